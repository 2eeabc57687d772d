"""Overlap: exposed communication by hand, formulas against simulated steps, and the same program on real processes."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import Cluster, launch, overlap, simulate
from manyranks.collectives import ring_all_reduce_seconds
from manyranks.data_parallel import timed_step
from manyranks.overlap import (
    best_bucket,
    contended_seconds,
    covered,
    exposed_seconds,
    exposure,
    hiding_bandwidth,
    merged,
    overlap_trial,
)
from manyranks.runtime import phantom

spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda p: (min(p), max(p))), max_size=12
)


def step(cluster, sizes, forward, limit, **options):
    return simulate(
        timed_step,
        cluster=cluster,
        sizes=sizes,
        forward_seconds=forward,
        limit=limit,
        algorithm="closed_form",
        **options,
    )


def test_doctests():
    assert doctest.testmod(overlap).failed == 0


@given(spans, spans)
def test_unions_and_intersections_agree_with_counting_points(a, b):
    def points(intervals):
        return {t for start, end in intervals for t in range(start, end)}

    disjoint = merged(a)
    assert points(disjoint) == points(a) == {t for s, e in disjoint for t in range(s, e)}
    assert all(e1 < s2 for (_, e1), (s2, _) in zip(disjoint, disjoint[1:]))
    assert covered(a, by=b) == covered(b, by=a) == len(points(a) & points(b))


def test_exposure_by_hand():
    """3 ms of computing, then a message of 4 ms starts; 1 ms of computing beside it, 2 ms of nothing to do."""

    def program(comm):
        comm.compute(seconds=3e-3)
        work = comm.all_reduce(phantom(1_000_000), async_op=True)  # 2 ranks: 4 MB in all over 1 GB/s
        comm.compute(seconds=1e-3)
        work.wait()
        if comm.rank == 0:
            comm.compute(seconds=2e-3)

    run = simulate(program, cluster=Cluster.flat(2, latency=0, bandwidth=1e9))
    first, second = exposure(run), exposure(run, rank=1)
    assert first == pytest.approx((6e-3, 4e-3, 3e-3, 0), abs=1e-12)
    assert second == pytest.approx((4e-3, 4e-3, 3e-3, 2e-3), abs=1e-12)
    assert first.hidden == pytest.approx(0.25)


def test_two_collectives_at_once_count_once():
    def program(comm):
        pair = comm.group(range(2))
        works = [c.all_reduce(phantom(1_000_000), async_op=True) for c in (comm, pair)]
        for work in works:
            work.wait()

    run = simulate(program, cluster=Cluster.flat(2, latency=0, bandwidth=1e9))
    assert exposure(run).communicating == pytest.approx(run.seconds)
    assert exposure(run).hidden == pytest.approx(0)


def test_a_blocking_collective_is_exposed():
    run = simulate(
        lambda comm: [comm.compute(seconds=1e-3), comm.all_reduce(phantom(1_000_000))] and None,
        cluster=Cluster.flat(2, latency=0, bandwidth=1e9),
    )
    assert exposure(run) == pytest.approx((1e-3, 4e-3, 4e-3, 0), abs=1e-12)


def test_nothing_to_communicate_is_hidden():
    e = exposure(simulate(lambda comm: comm.compute(seconds=1.0), ranks=1))
    assert e == (1.0, 0.0, 0.0, 0.0) and e.hidden == 1.0


@pytest.mark.parametrize("buckets", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("bandwidth", [2e9, 10e9, 50e9])
@pytest.mark.parametrize("ranks", [2, 5])
def test_formula_is_the_simulation(buckets, bandwidth, ranks):
    """Even gradients, whole buckets: the formula is exact."""
    sizes, forward, alpha = [250_000] * 32, 0.004, 20e-6
    cluster = Cluster.flat(ranks, latency=alpha, bandwidth=bandwidth)
    size = 4 * sum(sizes)
    run = step(cluster, sizes, forward, limit=size / buckets)
    predicted = exposed_seconds(size, 2 * forward, size / buckets, ranks, alpha, bandwidth)
    assert exposure(run).exposed == pytest.approx(predicted, rel=1e-9)
    assert run.seconds == pytest.approx(3 * forward + predicted, rel=1e-9)


@settings(max_examples=60)
@given(
    size=st.floats(1e6, 1e11),
    backward=st.floats(1e-3, 10),
    ranks=st.integers(2, 512),
    alpha=st.floats(1e-7, 1e-3),
    beta=st.floats(1e8, 1e12),
)
def test_no_bucket_beats_the_best(size, backward, ranks, alpha, beta):
    best = best_bucket(size, backward, ranks, alpha, beta)
    assert 0 < best <= size
    least = exposed_seconds(size, backward, best, ranks, alpha, beta)
    for bucket in np.geomspace(size / 1e5, size, 200):
        assert least <= exposed_seconds(size, backward, bucket, ranks, alpha, beta) * (1 + 1e-9)


def test_best_bucket_by_hand():
    """S = 100 MB, T = 100 ms, a = 1 ms; a network that needs 50 ms: a/(T - cS) = 1/50 beats sqrt(1/100)."""
    assert best_bucket(1e8, 0.1, 2, alpha=5e-4, beta=2e9) == pytest.approx(2e6)
    assert best_bucket(1e8, 0.1, 2, alpha=5e-4, beta=5e8) == pytest.approx(
        1e7
    )  # needs 200 ms: the square root
    # needs 95 ms: hardly anything to spare, and the square root is the smaller of the two
    assert best_bucket(1e8, 0.1, 2, alpha=5e-4, beta=1e8 / 0.095) == pytest.approx(1e7)
    assert best_bucket(1e8, 0.1, 2, alpha=1.0, beta=2e9) == 1e8  # latency beyond all: one bucket


@pytest.mark.parametrize("buckets", [2, 8])
def test_hiding_bandwidth_is_where_only_the_last_bucket_shows(buckets):
    sizes, forward, alpha, ranks = [250_000] * 16, 0.004, 20e-6, 4
    size = 4 * sum(sizes)
    wall = hiding_bandwidth(size, 2 * forward, buckets, ranks, alpha)
    for factor, hidden in ((0.99, False), (1.001, True), (3, True)):
        cluster = Cluster.flat(ranks, latency=alpha, bandwidth=wall * factor)
        run = step(cluster, sizes, forward, limit=size / buckets)
        last = ring_all_reduce_seconds(size / buckets, ranks, alpha, wall * factor)
        assert (exposure(run).exposed < last * (1 + 1e-9)) == hidden


def test_no_bandwidth_is_enough_if_latency_takes_all():
    assert hiding_bandwidth(1e9, 0.1, 100, 64, alpha=1e-5) == math.inf
    assert hiding_bandwidth(1e9, 0.1, 100, 1, alpha=1e-5) == 0


def test_contention():
    assert contended_seconds(10, 4) == 10 and contended_seconds(4, 10) == 10
    assert contended_seconds(10, 4, slower=0.5) == 12  # four seconds at half speed leave two to do
    assert contended_seconds(1, 10, slower=0.5) == 10
    assert contended_seconds(10, 4, slower=0.5, longer=1.0) == 14  # as long as one after the other


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: exposed_seconds(0, 1, 1, 2, 0, 1), "size"),
        (lambda: exposed_seconds(1, 1, 0, 2, 0, 1), "bucket"),
        (lambda: exposed_seconds(1, 1, 1, 0, 0, 1), "ranks"),
        (lambda: best_bucket(1, 0, 2, 0, 1), "backward"),
        (lambda: exposed_seconds(1, 1, 1, 2, -1, 1), "alpha"),
        (lambda: best_bucket(1, 1, 2, 0, 0), "beta"),
        (lambda: hiding_bandwidth(1, 1, 1, 2, -1), "alpha"),
        (lambda: exposed_seconds(math.nan, 1, 1, 2, 0, 1), "size"),
        (lambda: hiding_bandwidth(1, 1, 0, 2, 0), "buckets"),
        (lambda: contended_seconds(1, 1, slower=1), "slower"),
        (lambda: contended_seconds(1, -1), "communicating"),
        (lambda: exposure(simulate(lambda comm: None, ranks=2), rank=2), "rank"),
    ],
)
def test_bad_input_names_the_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()


def test_trial_overlaps_in_the_simulation():
    run = simulate(overlap_trial, ranks=2, x=phantom((64, 64)), gradient=phantom(1000), repeats=2)
    t = {name: seconds[-1] for name, seconds in run.results[0].items()}
    assert t["both"] == pytest.approx(max(t["computing"], t["communicating"]))
    assert all(len(seconds) == 2 for seconds in run.results[0].values())


def test_trial_on_real_processes():
    run = launch(
        lambda comm, pair: overlap_trial(comm, *pair, repeats=1),
        inputs=[(np.ones((8, 8), np.float32), np.ones(8, np.float32))] * 2,
        timeout=60,
    )
    assert all(min(seconds) > 0 for r in run.results for seconds in r.values())
