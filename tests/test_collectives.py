"""Chapter 2's module: right sums, counted bytes and steps, the clock of the runtime's own ring, and real processes."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import Cluster, collectives, simulate
from manyranks.runtime import phantom
from manyranks.runtime.costs import ring_all_reduce_seconds

ALL_REDUCES = [collectives.naive_all_reduce, collectives.pass_around_all_reduce, collectives.ring_all_reduce]


def distinct(ranks, shape, dtype=np.int64):
    """Rank-distinct data of whole numbers, so that any order of additions gives the same sum."""
    return [np.random.default_rng(1000 + r).integers(-99, 99, shape).astype(dtype) for r in range(ranks)]


def test_worked_examples():
    result = doctest.testmod(collectives)
    assert result.attempted > 5 and result.failed == 0


@pytest.mark.parametrize("program", ALL_REDUCES, ids=lambda p: p.__name__)
@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 9),
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    dtype=st.sampled_from([np.float32, np.float64, np.int64]),
)
def test_all_reduce_is_the_plain_sum(program, ranks, shape, dtype):
    data = distinct(ranks, shape, dtype)
    before = [x.copy() for x in data]
    run = simulate(program, inputs=data)
    for result in run.results:
        assert result.shape == shape and result.dtype == dtype
        np.testing.assert_array_equal(result, sum(before))
    for x, old in zip(data, before):
        np.testing.assert_array_equal(x, old)


@pytest.mark.parametrize("nodes, per_node", [(1, 1), (1, 4), (3, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("length", [0, 1, 5, 24, 25])
def test_hierarchical_all_reduce_is_the_plain_sum(nodes, per_node, length):
    data = distinct(nodes * per_node, (length,))
    run = simulate(collectives.hierarchical_all_reduce, inputs=data, per_node=per_node)
    for result in run.results:
        np.testing.assert_array_equal(result, sum(data))


def test_hierarchical_all_reduce_sends_a_share_across_nodes():
    cluster = Cluster(nodes=4, gpus_per_node=8, gpu="H100")
    size = 32 * 8 * 4
    run = simulate(collectives.hierarchical_all_reduce, cluster=cluster, inputs=[phantom(size // 4)] * 32, per_node=8)
    assert set(run.traffic.where(tier=1).sent()) == {2 * (size // 8) * 3 // 4}
    assert set(run.traffic.where(tier=0).sent()) == {2 * size * 7 // 8}


def test_hierarchical_all_reduce_refuses_nodes_that_do_not_divide():
    with pytest.raises(RuntimeError, match="per_node must divide the 4 ranks, got 3"):
        simulate(collectives.hierarchical_all_reduce, inputs=distinct(4, (3,)), per_node=3)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(1, 12), length=st.integers(0, 50))
def test_the_ring_is_the_runtimes_ring_message_by_message(ranks, length):
    ours = simulate(collectives.ring_all_reduce, inputs=distinct(ranks, (length,)))
    theirs = simulate(lambda comm, x: comm.all_reduce(x, algorithm="ring"), inputs=distinct(ranks, (length,)))
    assert ours.ends == theirs.ends
    assert [m[:6] for m in ours.traffic] == [m[:6] for m in theirs.traffic]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_counted_cost_is_the_formula(ranks):
    size = 4 * ranks * 100
    run = simulate(collectives.ring_all_reduce, inputs=[phantom(size // 4)] * ranks)
    steps, sent = collectives.ring_all_reduce_cost(size, ranks)
    assert run.rounds == steps
    assert set(run.bytes_sent.tolist()) == {sent}
    tier = run.cluster.tiers[0]
    predicted = collectives.ring_all_reduce_seconds(size, ranks, tier.latency, tier.bandwidth)
    assert run.seconds == pytest.approx(predicted)
    assert predicted == pytest.approx(float(ring_all_reduce_seconds(size, ranks, tier.latency, tier.bandwidth)))


def test_gradient_of_seven_billion_parameters():
    gradient = phantom(7_000_000_000, np.float16)
    for ranks, gigabytes in ((8, 24.5), (64, 27.5625)):
        run = simulate(collectives.ring_all_reduce, inputs=[gradient] * ranks)
        assert set(run.bytes_sent / 1e9) == {gigabytes}


def test_bad_input():
    with pytest.raises(ValueError, match="ranks must be 1 or more, got 0"):
        collectives.ring_all_reduce_cost(1, 0)
    for ranks in (2, 3, 6):
        with pytest.raises(ValueError, match=f"ranks must be a power of two, 4 or more, got {ranks}"):
            collectives.tree_ring_crossover(ranks, 1e-6, 1e9)


@pytest.mark.parametrize("ranks", [4, 16, 128])
def test_crossover_is_where_tree_and_ring_take_the_same_time(ranks):
    alpha, beta = 2e-6, 30e9
    size = 4 * round(collectives.tree_ring_crossover(ranks, alpha, beta) / 4)
    cluster = Cluster.flat(ranks, latency=alpha, bandwidth=beta)
    ring, tree = (
        simulate(lambda comm, name=name: comm.all_reduce(phantom(size // 4), algorithm=name), cluster=cluster).seconds
        for name in ("ring", "tree")
    )
    assert ring == pytest.approx(tree, rel=0.01)


def many_lengths(comm, inputs):
    return [[program(comm, x) for program in ALL_REDUCES] for x in inputs]


def test_real_processes_give_the_simulators_bits():
    pytest.importorskip("torch")
    from manyranks import launch

    lengths = (0, 1, 2, 3, 7, 1000)
    data = [[np.random.default_rng(9 * r + n).normal(size=n).astype(np.float32) for n in lengths] for r in range(3)]
    real, virtual = launch(many_lengths, inputs=data, timeout=120), simulate(many_lengths, inputs=data)
    for ours, theirs in zip(real.results, virtual.results):
        for a, b in zip(ours, theirs):
            for x, y in zip(a, b):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)
    assert real.bytes_sent.tolist() == virtual.bytes_sent.tolist()
    assert real.rounds == virtual.rounds
