"""ZeRO: every stage equals dense Adam, memory and traffic are the ledger's, on virtual ranks and on real ones."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import Cluster, launch, simulate, zero
from manyranks.collectives import split
from manyranks.data_parallel import (
    batch_order,
    checksum,
    distance,
    flatten,
    init_mlp,
    leaves,
    loss_and_gradient,
)
from manyranks.memory import training_ledger
from manyranks.runtime import RankError
from manyranks.zero import (
    Memory,
    Op,
    ZeroModel,
    dense_adam,
    hybrid_groups,
    offload_step,
    row_chunk,
    time_stages,
    timed_zero_step,
    zero_gradient,
    zero_peak,
    zero_schedule,
    zero_step_seconds,
    zero_traffic,
    zero_train,
)

STATE = ("weights", "gradients", "master weights", "moments")
RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(96, 7)), np.eye(3)[RNG.integers(0, 3, 96)]


def job(sizes, batch, steps=3, seed=0):
    return dict(
        params=init_mlp(sizes, seed=seed), data=DATA, order=batch_order(96, batch, steps, seed=seed), lr=1e-2
    )


def test_doctests():
    result = doctest.testmod(zero)
    assert result.attempted > 10 and result.failed == 0


# ---------------------------------------------------------------------------- equality


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 8),
    stage=st.integers(0, 3),
    hidden=st.lists(st.integers(1, 13), min_size=1, max_size=3),
    batch=st.integers(24, 61),
    micro_steps=st.integers(1, 3),
    prefetch=st.integers(0, 3),
    overlap=st.booleans(),
    reshard=st.booleans(),
    per_unit=st.integers(1, 4),
)
def test_every_stage_equals_dense_adam(
    ranks, stage, hidden, batch, micro_steps, prefetch, overlap, reshard, per_unit
):
    case = job((7, *hidden, 3), batch, seed=batch)
    dense, losses = dense_adam(**case)
    options = dict(
        micro_steps=micro_steps, prefetch=prefetch, overlap=overlap, reshard=reshard, per_unit=per_unit
    )
    results = simulate(zero_train, ranks=ranks, stage=stage, **case, **options).results
    for history in results:
        assert distance(history.params, dense) < 1e-11
        assert (
            history.memory.now.get("gathered weights", 0)
            == history.memory.now.get("gradient buckets", 0)
            == 0
        )
    assert np.allclose(np.sum([h.losses for h in results], axis=0), losses, rtol=0, atol=1e-11)


@pytest.mark.parametrize("precision", zero.PRECISIONS)
@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_the_stages_agree_to_the_bit(ranks, precision):
    runs = [
        simulate(zero_train, ranks=ranks, stage=s, precision=precision, **job((7, 11, 5, 3), 40)).results
        for s in range(4)
    ]
    assert len({checksum(h.params) for run in runs for h in run}) == 1


@pytest.mark.parametrize(("ranks", "shard"), ((4, 2), (6, 3), (8, 1), (8, 8)))
@pytest.mark.parametrize("stage", (2, 3))
def test_hybrid_sharding_equals_dense_adam(ranks, shard, stage):
    case = job((7, 5, 3), 48)
    dense, _ = dense_adam(**case)
    for history in simulate(zero_train, ranks=ranks, stage=stage, shard=shard, micro_steps=2, **case).results:
        assert distance(history.params, dense) < 1e-11


def test_weights_and_gradient_by_hand():
    """Two ranks, one unit of three parameters: padded to four, rank 1 owns the last and the padding."""

    def program(comm):
        model = ZeroModel(comm, [[np.array([1.0, 2.0, 3.0])]], 3, "fp64")
        model.reduce(0, [np.array([1.0, 2.0, 3.0]) * (comm.rank + 1)])
        return model.units[0].weight, model.gradient(0), model.weights(0)[0]

    for (weight, gradient, whole), expected in zip(simulate(program, ranks=2).results, ([1, 2], [3, 0])):
        assert np.array_equal(weight, expected)
        assert np.array_equal(gradient, np.multiply(expected, 1.5))
        assert np.array_equal(whole, [1, 2, 3])


def test_one_step_of_adam_by_hand():
    """The first step of Adam moves every parameter by the learning rate against its gradient's sign."""

    def program(comm, stage):
        model = ZeroModel(comm, [[np.zeros(5)]], stage, "fp64")
        model.reduce(0, [np.array([1.0, -2.0, 3.0, -4.0, 5.0])])
        model.step(lr=0.5)
        return model.parameters()[0][0]

    for stage in range(4):
        for found in simulate(program, ranks=3, stage=stage).results:
            assert np.allclose(found, [-0.5, 0.5, -0.5, 0.5, -0.5], rtol=0, atol=1e-8)


# ---------------------------------------------------------------------------- memory


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=6),
    ranks=st.integers(1, 8),
    stage=st.integers(0, 3),
    prefetch=st.integers(0, 3),
    overlap=st.booleans(),
    reshard=st.booleans(),
    precision=st.sampled_from(list(zero.PRECISIONS)),
)
def test_counted_memory_is_the_ledgers_and_the_peak_is_predicted(
    sizes, ranks, stage, prefetch, overlap, reshard, precision
):
    options = dict(stage=stage, prefetch=prefetch, overlap=overlap, reshard=reshard, precision=precision)
    run = simulate(timed_zero_step, ranks=ranks, sizes=sizes, **options)
    padded = sum(size + -size % ranks for size in sizes)
    for step in run.results:
        assert step.memory.peak == zero_peak(sizes, ranks, **options)
        assert set(step.held) <= set(STATE)
        if precision != "fp64":
            ledger = training_ledger(padded, convention=precision).sharded(ranks, stage)
            assert sum(step.held.values()) == ledger.total
            assert (step.held["weights"], step.held["gradients"]) == (ledger.weight, ledger.gradient)


@pytest.mark.parametrize("stage", range(4))
def test_the_account_is_what_the_model_holds(stage):
    def program(comm, params):
        model = ZeroModel(comm, [[layer] for layer in params], stage, "mixed16")
        zero_gradient(model, DATA[0][:4], DATA[1][:4])
        arrays = {}
        for unit in model.units:
            parts = [unit.weight, unit.gradient, unit.master, *unit.adam["m"], *unit.adam["v"], unit.whole]
            for a in parts:
                if a is not None:
                    base = a if a.base is None else a.base  # a view keeps the whole of its base alive
                    arrays[id(base)] = base
        return sum(a.nbytes for a in arrays.values()), model.memory.total

    for walked, entered in simulate(program, ranks=4, params=init_mlp((7, 12, 8, 3))).results:
        assert walked == entered


def test_the_ladder_of_seven_billion():
    sizes, held = [218_750_000] * 32, []
    for stage in range(4):
        run = simulate(timed_zero_step, ranks=8, sizes=sizes, stage=stage)
        held.append(sum(run.results[0].held.values()) / 1e9)
        assert run.bytes_sent.tolist() == [zero_traffic(7e9, 8, stage)] * 8
    assert held == [112, 38.5, 26.25, 14]


def test_memory_refuses_to_free_what_it_does_not_hold():
    memory = Memory()
    with pytest.raises(ValueError, match="kind 'x' holds 0 bytes, got 8"):
        memory.free("x", np.zeros(1))


# ---------------------------------------------------------------------------- traffic, schedules, time


@settings(max_examples=25, deadline=None)
@given(
    units=st.integers(1, 4),
    ranks=st.integers(1, 6),
    stage=st.integers(0, 3),
    micro_steps=st.integers(1, 3),
    reshard=st.booleans(),
)
def test_counted_traffic_is_predicted(units, ranks, stage, micro_steps, reshard):
    options = dict(stage=stage, micro_steps=micro_steps, reshard=reshard)
    run = simulate(timed_zero_step, ranks=ranks, sizes=[60 * ranks] * units, **options)
    assert run.bytes_sent.tolist() == [zero_traffic(60 * ranks * units, ranks, **options)] * ranks


@settings(max_examples=40, deadline=None)
@given(units=st.integers(1, 9), prefetch=st.integers(0, 4), reshard=st.booleans())
def test_a_schedule_computes_all_in_order_and_frees_all(units, prefetch, reshard):
    there, most, computed = set(), 0, []
    for name, i in zero_schedule(units, prefetch, reshard):
        if name == "gather":
            there.add(i)
            most = max(most, len(there))
        elif name == "release":
            there.remove(i)
        else:
            assert name == "reduce" or i in there
            computed.append((name, i))
    backward = [(name, i) for i in reversed(range(units)) for name in ("backward", "reduce")]
    assert computed == [("forward", i) for i in range(units)] + backward
    assert not there
    assert most == (min(units, prefetch + 1) if reshard else units)


@pytest.mark.parametrize("beta", (450e9, 50e9, 12.5e9))
@pytest.mark.parametrize("overlap", (True, False))
def test_step_seconds(beta, overlap):
    cluster = Cluster(nodes=1, gpus_per_node=4, gpu="H100", intra_bandwidth=beta)
    for stage in range(4):
        options = dict(sizes=[500_000_000] * 8, stage=stage, forward_seconds=0.1, overlap=overlap)
        run = simulate(timed_zero_step, cluster=cluster, **options)
        predicted = zero_step_seconds(4e9, 8, 4, stage, 0.1, cluster.intra.latency, beta, overlap)
        assert predicted == pytest.approx(run.seconds, rel=0.04 if overlap else 1e-6)


def test_overlap_and_prefetch_save_time_and_no_bytes():
    cluster = Cluster(nodes=1, gpus_per_node=4, gpu="H100", intra_bandwidth=50e9)
    options = dict(cluster=cluster, sizes=[200_000_000] * 6, stage=3, forward_seconds=0.06)
    runs = [
        simulate(timed_zero_step, **options, prefetch=p, overlap=o)
        for p, o in ((0, False), (0, True), (1, True))
    ]
    # without prefetching each gather queues behind the reduction before it, so overlapping that alone gains nothing
    assert runs[0].seconds >= runs[1].seconds > 1.2 * runs[2].seconds
    assert len({run.bytes_sent[0] for run in runs}) == 1


def test_hybrid_sharding_keeps_gathers_in_the_node():
    cluster = Cluster(nodes=2, gpus_per_node=4, gpu="H100")
    options = dict(cluster=cluster, sizes=[4_000_000] * 4, stage=3)
    run = simulate(timed_zero_step, **options, shard=4)
    between = run.traffic.where(tier=1)
    assert {m.call for m in between} == {"all_reduce"}
    assert (
        between.sent().tolist() == [2 * 16_000_000 // 4 * 2 // 2] * 8
    )  # an all-reduce of a quarter over 2 nodes
    assert run.results[0].held["weights"] == 2 * 16_000_000 // 4


def test_offloading_counts_and_hides():
    sizes = [1_000_000] * 8
    host = Cluster(nodes=2, gpus_per_node=2, gpu="H100", intra_bandwidth=50e9, inter_bandwidth=10e9)
    two, three = (
        simulate(offload_step, ranks=n, cluster=host, sizes=sizes, forward_seconds=0.01, host_bandwidth=300e9)
        for n in (2, 3)
    )
    assert two.bytes_sent.tolist() == [16_000_000, 16_000_000]
    assert three.bytes_sent.tolist() == [16_000_000, 16_000_000 + 96_000_000, 96_000_000]
    late = simulate(
        offload_step,
        ranks=2,
        cluster=host,
        sizes=sizes,
        forward_seconds=0.01,
        host_bandwidth=300e9,
        stream=False,
    )
    assert 0.03 < two.seconds < late.seconds


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: list(zero_schedule(0)), "units must be 1"),
        (lambda: list(zero_schedule(2, prefetch=-1)), "prefetch must be 0"),
        (lambda: zero_traffic(10, 0, 1), "ranks must be 1"),
        (lambda: zero_traffic(10, 2, 4), "stage must be 0, 1, 2 or 3, got 4"),
        (lambda: row_chunk(10, 4, 4), "rank must be from 0"),
    ),
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("program", "message"),
    (
        (lambda comm: ZeroModel(comm, [[np.ones(2)]], 4), "stage must be 0, 1, 2 or 3, got 4"),
        (lambda comm: ZeroModel(comm, [[np.ones(2)]], 1, "fp8"), "precision must be one of"),
        (lambda comm: ZeroModel(comm, [], 1), "units must hold one"),
        (lambda comm: ZeroModel(comm, [[np.ones(2)]], 1, replicas=comm), "replicas go with stages 2 and 3"),
        (lambda comm: hybrid_groups(comm, 2), "shard must divide the 3 ranks, got 2"),
        (
            lambda comm: zero_gradient(
                ZeroModel(comm, [init_mlp((7, 3))], 0, "fp64"), DATA[0][:0], DATA[1][:0]
            ),
            "x must hold one",
        ),
    ),
)
def test_bad_arguments_in_a_program(program, message):
    with pytest.raises(RankError, match=message):
        simulate(program, ranks=3)


@pytest.mark.parametrize("ranks", (1, 3, 4, 7))
def test_row_chunks_are_torch_chunk(ranks):
    torch = pytest.importorskip("torch")
    for rows in (1, 2, 5, 10, 13):
        pieces = [len(piece) for piece in torch.zeros(rows, 2).chunk(ranks)]
        assert [row_chunk(rows, ranks, r) for r in range(ranks)] == pieces + [0] * (ranks - len(pieces))


# ---------------------------------------------------------------------------- real processes


def test_on_real_processes():
    pytest.importorskip("torch")
    case = job((7, 11, 5, 3), 40)

    def program(comm, **case):
        runs = [zero_train(comm, stage=stage, prefetch=1, overlap=True, **case) for stage in range(4)]
        timed = time_stages(
            comm,
            [{k: a.float() for k, a in layer.items()} for layer in case["params"]],
            (case["data"][0][:8].float(), case["data"][1][:8].float()),
            repeats=1,
        )
        return [(h.losses, h.params, h.held) for h in runs], timed

    real = launch(program, ranks=2, device="cpu", timeout=120, **case)
    dense, losses = dense_adam(**case)
    for stage in range(4):
        virtual = simulate(zero_train, ranks=2, stage=stage, **case).results
        for (_, params, held), expected in zip((r[0][stage] for r in real.results), virtual):
            assert distance(params, dense) < 1e-11
            assert held == expected.held
        assert np.allclose(np.sum([r[0][stage][0] for r in real.results], axis=0), losses, rtol=0, atol=1e-11)
    timed = real.results[0][1]
    padded = sum(n + n % 2 for n in (sum(a.size for a in leaves(layer)) for layer in case["params"]))
    assert timed["held"] == [training_ledger(padded, convention="fp32").sharded(2, s).total for s in range(4)]
    assert all(t > 0 for times in timed["seconds"] for t in times)


def test_the_gradient_is_the_mean_of_the_whole_batch():
    params = init_mlp((7, 11, 5, 3), seed=1)

    def program(comm, stage):
        model = ZeroModel(comm, [[layer] for layer in params], stage, "fp64")
        mine = split(np.arange(31), comm.size)[comm.rank]  # unequal shards
        zero_gradient(model, DATA[0][mine], DATA[1][mine], len(mine) / 31, schedule=[*zero_schedule(3)])
        parts = [model.gradient(i) for i in range(3)]
        return [(p if stage == 0 else comm.all_gather(p))[: u.size] for p, u in zip(parts, model.units)]

    expected = flatten(loss_and_gradient(params, DATA[0][:31], DATA[1][:31])[1])
    for stage in range(4):
        for found in simulate(program, ranks=4, stage=stage).results:
            assert np.allclose(np.concatenate(found), expected, rtol=0, atol=1e-13)
    assert Op("gather", 0) == next(zero_schedule(1))
