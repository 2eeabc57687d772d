"""Checkpoints: whole or not there, the same bits after a restart, other numbers of ranks, and how often."""

from __future__ import annotations

import doctest
import math
import os
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import launch, resume, simulate
from manyranks.collectives import split
from manyranks.data_parallel import adam_init, adam_step, flatten, init_mlp, loss_and_gradient, unflatten
from manyranks.resume import (
    FORGETTABLE,
    Shard,
    best_interval,
    daly_interval,
    goodput,
    latest_checkpoint,
    load_manifest,
    load_shard,
    mean_time_between_failures,
    run_until_done,
    save_checkpoint,
    simulate_failures,
    train_resumably,
    write_atomically,
    young_interval,
)
from manyranks.runtime import RankError

RNG = np.random.default_rng(0)
JOB = dict(
    params=init_mlp((5, 7, 3), seed=1),
    data=(RNG.normal(size=(40, 5)), np.eye(3)[RNG.integers(0, 3, 40)]),
    batch=12,
    steps=12,
    lr=1e-2,
    every=3,
)


def test_doctests():
    result = doctest.testmod(resume)
    assert result.attempted >= 3 and result.failed == 0


# ---------------------------------------------------------------------------- the training program


def test_it_is_adam():
    """One rank without noise: the losses of `adam_step` on the same order."""
    run = simulate(train_resumably, ranks=1, noise=0.0, **JOB).results[0]
    params, state = flatten(JOB["params"]), None
    state, stream = adam_init(params), np.random.default_rng(0)
    order, position, losses = stream.permutation(40), 0, []
    for _ in range(JOB["steps"]):
        if position + 12 > 40:
            order, position = stream.permutation(40), 0
        rows, position = order[position : position + 12], position + 12
        stream.normal(size=(12, 5))
        x, targets = (part[rows] for part in JOB["data"])
        loss, grads = loss_and_gradient(unflatten(params, JOB["params"]), x, targets)
        params, state = adam_step(params, flatten(grads), state, lr=JOB["lr"])
        losses.append(float(loss))
    assert np.allclose(run.losses, losses, rtol=1e-12)
    assert np.allclose(run.params, params, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_change_nothing_but_the_rounding(ranks):
    one = simulate(train_resumably, ranks=1, **JOB).results[0]
    for result in simulate(train_resumably, ranks=ranks, **JOB).results:
        assert np.allclose(result.losses, one.losses, rtol=1e-10)


@pytest.mark.parametrize("stop", [3, 5, 7, 11])
def test_a_restart_changes_no_bit(tmp_path, stop):
    whole = simulate(train_resumably, ranks=3, **JOB).results
    simulate(train_resumably, ranks=3, folder=tmp_path, **(JOB | {"steps": stop}))
    rest = simulate(train_resumably, ranks=3, folder=tmp_path, **JOB).results
    assert rest[0].first == stop // 3 * 3
    for ours, theirs in zip(rest, whole):
        assert ours.losses == theirs.losses[ours.first :]
        assert np.array_equal(ours.params, theirs.params)


@pytest.mark.parametrize("name", FORGETTABLE)
def test_whatever_is_forgotten_shows(tmp_path, name):
    whole = simulate(train_resumably, ranks=2, **JOB).results[0]
    simulate(train_resumably, ranks=2, folder=tmp_path, **(JOB | {"steps": 5}))
    rest = simulate(train_resumably, ranks=2, folder=tmp_path, forget=(name,), **JOB).results[0]
    assert rest.first == 3 and not np.array_equal(rest.params, whole.params)


@pytest.mark.parametrize("before, after", [(4, 1), (1, 4), (3, 2), (2, 6)])
def test_another_number_of_ranks_goes_on(tmp_path, before, after):
    whole = simulate(train_resumably, ranks=1, **JOB).results[0]
    simulate(train_resumably, ranks=before, folder=tmp_path, **(JOB | {"steps": 6}))
    rest = simulate(train_resumably, ranks=after, folder=tmp_path, **JOB).results[0]
    assert rest.first == 6 and np.allclose(rest.losses, whole.losses[6:], rtol=1e-10)


def test_bad_input_names_the_argument():
    with pytest.raises(RankError, match="batch must be a multiple of the 5 ranks, got 12"):
        simulate(train_resumably, ranks=5, **JOB)
    with pytest.raises(RankError, match="forget must be some of moments"):
        simulate(train_resumably, ranks=1, forget=("weights",), **JOB)


# ---------------------------------------------------------------------------- files


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state"
    write_atomically(path, b"old")

    def no_power(*ignored):
        raise OSError("no power")

    monkeypatch.setattr(os, "fsync", no_power)
    with pytest.raises(OSError, match="no power"):
        write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and [p.name for p in tmp_path.iterdir()] == ["state"]


def save(comm, folder, length, step=4, fail=None):
    state = np.arange(3.0 * length).reshape(3, length)
    bounds = np.cumsum([0] + [len(part) for part in split(state[0], comm.size)])
    start, stop = int(bounds[comm.rank]), int(bounds[comm.rank + 1])

    def hook():
        if comm.rank == fail:
            raise OSError("disk full")

    save_checkpoint(comm, folder, step, Shard(start, *state[:, start:stop]), {"note": 7}, hook)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 17))
def test_shards_are_cut_anew(tmp_path_factory, writers, readers, length):
    folder = tmp_path_factory.mktemp("checkpoint")
    simulate(save, ranks=writers, folder=folder, length=length)
    checkpoint = latest_checkpoint(folder)
    assert checkpoint.name == "step-00000004"
    assert load_manifest(checkpoint)["common"] == {"note": 7}
    state, stop = np.arange(3.0 * length).reshape(3, length), 0
    for part in split(np.zeros(length), readers):
        start, stop = stop, stop + len(part)
        shard = load_shard(checkpoint, start, stop)
        assert shard.start == start
        assert np.array_equal([shard.params, shard.m, shard.v], state[:, start:stop])


def test_nothing_is_committed_until_all_have_written(tmp_path):
    simulate(save, ranks=3, folder=tmp_path, length=8, step=4)
    with pytest.raises(RankError, match="disk full"):
        simulate(save, ranks=3, folder=tmp_path, length=8, step=8, fail=2)
    assert latest_checkpoint(tmp_path).name == "step-00000004"
    simulate(save, ranks=2, folder=tmp_path, length=8, step=8)  # over what the crash left
    assert latest_checkpoint(tmp_path).name == "step-00000008"
    assert len(load_manifest(latest_checkpoint(tmp_path))["shards"]) == 2
    assert not list(tmp_path.glob("*.part"))


def test_damage_is_noticed(tmp_path):
    simulate(save, ranks=2, folder=tmp_path, length=6)
    checkpoint = latest_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="stop must be at most the state's length, got 7"):
        load_shard(checkpoint, 0, 7)
    shard = checkpoint / "00001.shard"
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(bytes(data))
    assert len(load_shard(checkpoint, 0, 3).params) == 3  # the other shard is whole
    with pytest.raises(ValueError, match="checkpoint must be undamaged, but 00001.shard"):
        load_shard(checkpoint, 2, 5)


def test_no_checkpoint_yet(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


# ---------------------------------------------------------------------------- real processes


def killer(plan, marks):
    def at(comm, moment, step):
        mark = os.path.join(marks, f"{moment}-{step}")
        if comm.rank == 1 and (moment, step) in plan and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def test_killed_processes_come_back_to_the_same_bits(tmp_path):
    pytest.importorskip("torch")
    whole = launch(train_resumably, ranks=2, device="cpu", timeout=120, **JOB).results[0]
    folder, marks = tmp_path / "checkpoints", tmp_path / "marks"
    marks.mkdir()
    at = killer([("step", 5), ("saving", 9)], str(marks))

    def start():
        return launch(train_resumably, ranks=2, device="cpu", timeout=120, folder=str(folder), at=at, **JOB)

    run, failures = run_until_done(start)
    assert len(failures) == 2
    assert run.results[0].first == 6
    assert run.results[0].losses == whole.losses[6:]
    assert np.array_equal(run.results[0].params, whole.params)


def test_restarts_come_to_an_end():
    calls = []

    def start():
        calls.append(1)
        raise RankError(1, "always dies")

    with pytest.raises(RankError, match="always dies"):
        run_until_done(start, restarts=2)
    assert len(calls) == 3


# ---------------------------------------------------------------------------- how often


def test_llama_3_s_rate():
    assert mean_time_between_failures(16384) == pytest.approx(54 * 24 * 3600 / 419)
    assert mean_time_between_failures(8) == pytest.approx(2048 * mean_time_between_failures(16384))


@settings(max_examples=60, deadline=None)
@given(st.floats(0.1, 1e3), st.floats(1e3, 1e6))
def test_best_interval_is_the_best(cost, mtbf):
    best = best_interval(cost, mtbf)
    top = goodput(best, cost, mtbf)
    for factor in (0.5, 0.98, 1.02, 2.0):
        assert goodput(best * factor, cost, mtbf) <= top
    assert daly_interval(cost, mtbf) == pytest.approx(best, rel=0.02)
    if cost < mtbf / 1000:
        assert young_interval(cost, mtbf) == pytest.approx(best, rel=0.03)
        assert 1 - top == pytest.approx(math.sqrt(2 * cost / mtbf), rel=0.1)


@pytest.mark.parametrize(
    "interval, cost, mtbf, restart", [(100, 5, 1000, 0), (500, 50, 900, 100), (20, 20, 60, 30)]
)
def test_formula_against_played_failures(interval, cost, mtbf, restart):
    played = [simulate_failures(interval, cost, mtbf, restart, 1500, seed) for seed in range(16)]
    spread = np.std(played) / 4
    assert abs(np.mean(played) - goodput(interval, cost, mtbf, restart)) < 4 * spread


def test_without_failures_only_saving_costs():
    assert simulate_failures(90.0, 10.0, 1e15, segments=5) == pytest.approx(0.9)
    assert goodput(90.0, 10.0, 1e15) == pytest.approx(0.9)
    assert goodput(1e6, 1.0, 10.0) == 0.0


@pytest.mark.parametrize("name", ["cost", "mtbf", "interval", "restart"])
def test_times_are_checked(name):
    times = {"interval": 10.0, "cost": 1.0, "mtbf": 100.0, "restart": 1.0} | {name: -1.0}
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds"):
        goodput(**times)
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds"):
        simulate_failures(**times)
    if name in ("cost", "mtbf"):
        for function in (young_interval, daly_interval, best_interval):
            with pytest.raises(ValueError, match=f"{name} must be"):
                function(cost=times["cost"], mtbf=times["mtbf"])


def test_daly_for_very_dear_checkpoints():
    assert daly_interval(cost=300.0, mtbf=100.0) == 100.0
    assert best_interval(cost=1e9, mtbf=100.0) == pytest.approx(100.0)
