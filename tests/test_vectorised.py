"""Ring collectives of phantoms timed all at once must equal the message-by-message run to the bit."""

import functools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyranks.runtime import costs, nccl, vectorised
from manyranks.runtime.hardware import Cluster, Tier
from manyranks.runtime.phantom import phantom
from manyranks.runtime.simulator import _simulate, simulate

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
N = vectorised.FROM_RANKS


def both(program, cluster, ranks=None, seeds=(0, 1)):
    """The run with and without the vectorised path; they must agree on everything but how rows are folded."""
    ranks = ranks or cluster.ranks
    fast = _simulate(program, ranks, None, cluster, False, {})
    slow = _simulate(program, ranks, None, cluster, False, {}, vectorise=False)
    for seed in seeds:
        again = _simulate(program, ranks, None, cluster, False, {}, shuffle=seed)
        assert again.ends == fast.ends and list(again.traffic) == list(fast.traffic)
    assert fast.ends == slow.ends
    assert fast.seconds == slow.seconds
    assert fast.bytes_sent.tolist() == slow.bytes_sent.tolist()
    assert fast.bytes_received.tolist() == slow.bytes_received.tolist()
    assert (fast.traffic.matrix() == slow.traffic.matrix()).all()
    assert fast.traffic.count == slow.traffic.count
    assert fast.rounds == slow.rounds
    assert list(fast.timeline) == list(slow.timeline)
    assert [_shape(r) for r in fast.results] == [_shape(r) for r in slow.results]
    return fast, slow


def _shape(x):
    return (x.shape, x.dtype) if hasattr(x, "shape") else x


def folded(run):
    return any(m.count > 1 for m in run.traffic)


CLUSTERS = [
    Cluster.flat(N),
    Cluster.flat(N + 3, latency=0.0, bandwidth=3.0),
    Cluster(nodes=3, gpus_per_node=8),
    Cluster(nodes=N, gpus_per_node=1),
    Cluster(5, 4, intra=Tier("near", 7.0, 1.0), inter=Tier("far", 0.5, 3.0)),
]


@FEW
@given(
    st.sampled_from(CLUSTERS),
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    st.integers(0, 500),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_one_collective(cluster, name, length, skewed, seed):
    rng = random.Random(seed)
    skew = [rng.random() * (30 if skewed else 0) for _ in range(cluster.ranks)]

    def program(comm):
        comm.compute(seconds=skew[comm.rank])
        extra = comm.rank % 3 if name == "all_gather" and skewed else 0
        x = phantom((length + extra, 3), np.float16)
        return [getattr(comm, name)(x) for _ in range(3)][-1]

    fast, _ = both(program, cluster)
    assert folded(fast)


@settings(FEW, max_examples=12)
@given(st.integers(0, 10**6), st.booleans())
def test_groups_messages_and_collectives_mixed(seed, two_tiers):
    """Two groups beside each other and some ranks in none, messages between all of them that meet the rings' ports."""
    rng = random.Random(seed)
    groups = [range(0, N), range(N, 2 * N)]
    n = 2 * N + 3
    cluster = (
        Cluster(7, 5, intra=Tier("a", 1.0, 3.0), inter=Tier("b", 2.0, 1.0))
        if two_tiers
        else Cluster.flat(n, 1.0, 2.0)
    )
    order = []  # one global order of doings, so that nothing can deadlock
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.4:
            order.append(
                (
                    "ring",
                    rng.randrange(3),
                    rng.choice(["all_reduce", "all_gather"]),
                    rng.choice([0, 5, 64, 1000]),
                )
            )
        else:
            src, dst = rng.sample(range(n), 2)
            order.append(("message", src, dst, rng.choice([0, 10, 3000])))
    skew = [rng.random() * rng.choice([0, 1, 100]) for _ in range(n)]

    def program(comm):
        mine = [comm.group(g) for g in groups]
        comm.compute(seconds=skew[comm.rank])
        waits = []
        for kind, a, b, c in order:
            if kind == "ring":
                where = comm if a == 2 else mine[a]
                if where is not None:
                    getattr(where, b)(phantom(c))
            elif comm.rank == a:
                waits.append(comm.isend(phantom(c), b))
            elif comm.rank == b:
                waits.append(comm.irecv(a))
                if c:
                    waits.pop().wait()
        for work in waits:
            work.wait()

    fast = _simulate(program, n, None, cluster, False, {})
    if fast.notes:  # an early leaver met a ring that had not ended: it must be said, and be no great matter
        assert "late" in fast.notes[0]
        return
    both(program, cluster, n)


def test_a_message_from_outside_during_the_ring_takes_its_turn():
    """Rank N sends to rank 3 in the middle of a ring of ranks 0 to N - 1: both are slowed down, as without folding."""
    cluster = Cluster.flat(N + 1, latency=1.0, bandwidth=1.0)

    def program(comm, when):
        ring = comm.group(range(N))
        if ring is None:
            comm.compute(seconds=when)
            comm.send(phantom(40, np.uint8), 3)
            return comm.time()
        if comm.rank == 3:
            coming = comm.irecv(N)
        ring.all_reduce(phantom(10 * N, np.uint8))
        if comm.rank == 3:
            coming.wait()
        return comm.time()

    alone = 2 * (N - 1) * 11.0
    for when, disturbs in ((0.0, True), (100.0, True), (alone - 30, True), (2 * alone, False)):
        fast, slow = both(functools.partial(program, when=when), cluster)
        assert not fast.notes
        assert folded(fast) is not disturbs
        assert (max(fast.ends[:3]) > alone) is disturbs


def test_disjoint_groups_are_all_folded():
    """Data-parallel groups of one size, started together, are each timed at once."""
    cluster = Cluster(nodes=8, gpus_per_node=8)

    def program(comm):
        mine = comm.group(range(comm.rank % 4, comm.size, 4))
        comm.compute(flops=1e12)
        return mine.all_reduce(phantom(10**9, np.float16)).nbytes

    fast, _ = both(program, cluster)
    assert len(fast.traffic) == 64 and all(m.count == 30 for m in fast.traffic)


def test_what_is_not_folded():
    n = N

    def real_arrays(comm):
        comm.all_reduce(np.ones(4))

    def beside(comm):
        comm.all_reduce(phantom(4), async_op=True).wait()

    def tree(comm):
        comm.all_reduce(phantom(4), algorithm="tree")

    def small(comm):
        g = comm.group(range(n - 1))
        if g:
            g.all_reduce(phantom(4))

    for program in (real_arrays, beside, tree, small):
        assert not folded(simulate(program, ranks=n))
    assert folded(simulate(lambda comm: comm.all_reduce(phantom(4)), ranks=n))


def test_folded_again_after_a_collective_beside_was_waited_for():
    def program(comm):
        comm.all_reduce(phantom(100), async_op=True).wait()
        comm.all_reduce(phantom(100))

    fast, _ = both(program, Cluster.flat(N))
    assert folded(fast)


def test_results_of_empty_rows():
    run = simulate(lambda comm: comm.all_gather(phantom((2, 0))), ranks=N)
    assert run.results[0].shape == (2 * N, 0)
    run = simulate(lambda comm: comm.all_reduce(phantom(())), ranks=N)
    assert run.results[0].shape == ()


@pytest.mark.parametrize("ranks, gigabytes", [(8, 24.5), (64, 27.5625)])
def test_seven_billion_gradients_in_fp16(ranks, gigabytes):
    run = simulate(lambda comm: comm.all_reduce(phantom(7_000_000_000, np.float16)), ranks=ranks)
    assert run.bytes_sent.tolist() == [gigabytes * 1e9] * ranks
    assert run.rounds == 2 * (ranks - 1)
    assert run.traffic.count == 2 * (ranks - 1) * ranks


def test_sixteen_thousand_ranks_take_the_formulas_time():
    n = 16_384
    run = simulate(lambda comm: comm.all_reduce(phantom(7_000_000_000, np.float16)).nbytes, ranks=n)
    assert run.results == [14_000_000_000] * n
    assert run.seconds == pytest.approx(costs.ring_all_reduce_seconds(14e9, n, 1e-6, 100e9), rel=2e-4)
    assert run.rounds == 2 * (n - 1) and run.traffic.count == 2 * (n - 1) * n


# ---------------------------------------------------------------------- closed forms


def test_closed_forms():
    cluster = Cluster(nodes=2, gpus_per_node=4)
    n, S = 8, 8_000

    def program(comm, algorithm):
        comm.compute(seconds=float(comm.rank))
        return comm.all_reduce(np.arange(1000.0) * comm.rank, algorithm=algorithm)

    for algorithm in ("closed_form", "nccl"):
        run = simulate(program, cluster=cluster, algorithm=algorithm)
        assert all(np.array_equal(r, np.arange(1000.0) * 28) for r in run.results)
        if algorithm == "nccl":
            took = nccl.all_reduce_seconds(S, cluster, ranks=n, nodes=2)
        else:
            took = costs.ring_all_reduce_seconds(S, n, *(cluster.inter.latency, cluster.inter.bandwidth))
        assert run.ends == [7.0 + took] * n  # the last comes at 7 s
        assert run.nominal and algorithm in run.notes[0] and "(nominal)" in repr(run)
        assert run.bytes_sent.tolist() == [2 * S * (n - 1) // n] * n
        run.results[0][:] = 0
        assert run.results[1][5] == 140


def test_a_closed_form_that_cannot_be_computed_is_everybodys_error(monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("no such cluster")

    monkeypatch.setattr(nccl, "all_reduce_seconds", broken)
    from manyranks.runtime.errors import RankError

    for seed in (None, 0, 1, 2):
        with pytest.raises(RankError, match="no such cluster") as caught:
            _simulate(
                lambda c: c.all_reduce(1.0, algorithm="nccl"),
                4,
                None,
                Cluster.flat(4),
                False,
                {},
                shuffle=seed,
            )
        assert caught.value.rank == 0
