"""The collective algorithms: right sums, and the bytes, messages and rounds that the formulas give."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyranks.runtime import schedules
from manyranks.runtime.comm import ALGORITHMS, CLOSED_FORMS
from manyranks.runtime.hardware import Cluster
from manyranks.runtime.phantom import phantom
from manyranks.runtime.schedules import ALL_REDUCE_STEPS, chunk_bounds
from manyranks.runtime.simulator import simulate

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIZES = [1, 2, 3, 4, 5, 7, 8, 12, 16, 17]
MOVED = [a for a in ALGORITHMS["all_reduce"] if a not in CLOSED_FORMS]
#: hierarchical needs equal nodes: these clusters hold n ranks
NODES = {
    1: (1, 1),
    2: (2, 1),
    3: (1, 3),
    4: (2, 2),
    5: (5, 1),
    7: (1, 7),
    8: (2, 4),
    12: (3, 4),
    16: (4, 4),
    17: (17, 1),
}


def run_all_reduce(n, algorithm, xs, op="sum"):
    cluster = Cluster(*NODES[n]) if n in NODES else Cluster.flat(n)
    return simulate(
        lambda comm, x: comm.all_reduce(x, op=op, algorithm=algorithm), cluster=cluster, inputs=xs
    )


def test_docstring_examples():
    result = doctest.testmod(schedules)
    assert result.attempted > 0 and result.failed == 0


@given(st.integers(0, 10**12), st.integers(1, 5000))
def test_chunk_bounds_are_those_of_array_split(length, chunks):
    bounds = chunk_bounds(length, chunks)
    sizes = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == length and len(bounds) == chunks + 1
    assert sizes.max() - sizes.min() <= 1 and (np.diff(sizes) <= 0).all()
    if length < 10**4 and chunks < 100:
        assert sizes.tolist() == [len(c) for c in np.array_split(np.empty(length), chunks)]


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("algorithm", MOVED)
def test_all_reduce_is_the_plain_sum(algorithm, n):
    """Rank-distinct whole numbers, so that sums are exact; fewer elements than ranks, none, and a remainder."""
    for shape in ((0,), (1,), (n - 1,), (n + 1,), (4 * n,), (3, 5), ()):
        rng = np.random.default_rng(n)
        xs = [rng.integers(-99, 99, shape).astype(float) + 1000 * r for r in range(n)]
        run = run_all_reduce(n, algorithm, xs)
        for out in run.results:  # on every rank, not only on the root
            assert out.shape == shape and np.array_equal(out, sum(xs))


@pytest.mark.parametrize("op, plain", [
    ("sum", np.sum), ("mean", np.mean), ("max", np.max), ("min", np.min), ("prod", np.prod),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", MOVED)
def test_operations(algorithm, op, plain):
    xs = [np.array([1.0, 2, -3, 4, 0.5]) * (1 + r % 3) for r in range(8)]
    for out in run_all_reduce(8, algorithm, xs, op).results:
        assert np.allclose(out, plain(xs, axis=0), rtol=1e-14)


@pytest.mark.parametrize("algorithm", MOVED)
def test_every_rank_gets_the_same_bits(algorithm):
    """Ranks must not differ in the last bit, or replicas drift apart."""
    for dtype in (np.float16, np.float32):
        xs = [np.random.default_rng(r).normal(size=37).astype(dtype) for r in range(12)]
        outs = run_all_reduce(12, algorithm, xs).results
        assert all(o.dtype == dtype and np.array_equal(o, outs[0]) for o in outs)


@FEW
@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 3), st.data())
def test_the_other_collectives(n, rows, columns, data):
    root = data.draw(st.integers(0, n - 1))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    rng = np.random.default_rng(rows)
    xs = [rng.integers(-99, 99, (rows, columns)) + 1000 * r for r in range(n)]
    ys = [rng.integers(-99, 99, (k, columns)) + 1000 * r for r, k in enumerate(lengths)]

    def program(comm, x, y):
        me = comm.rank
        out = {}
        for how in ("tree", "flat"):
            out["broadcast", how] = comm.broadcast(x if me == root else None, root, algorithm=how)
            out["reduce", how] = comm.reduce(x, root, algorithm=how)
        out["reduce_scatter"] = comm.reduce_scatter(x, op="max")
        out["all_gather"] = comm.all_gather(y)
        out["gather"] = comm.gather(y, root)
        out["scatter"] = comm.scatter(x if me == root else None, root)
        out["all_to_all"] = comm.all_to_all([y + 10 * dst for dst in range(n)])
        out["scalars"] = comm.all_gather(float(me))
        assert comm.barrier() is None
        return out

    results = simulate(lambda comm, xy: program(comm, *xy), inputs=list(zip(xs, ys)))
    bounds = chunk_bounds(rows, n)
    for r, out in enumerate(results.results):
        lo, hi = bounds[r], bounds[r + 1]
        for how in ("tree", "flat"):
            assert np.array_equal(out["broadcast", how], xs[root])
            assert np.array_equal(out["reduce", how], sum(xs)) if r == root else out["reduce", how] is None
        assert np.array_equal(out["reduce_scatter"], np.max(xs, axis=0)[lo:hi])
        assert np.array_equal(out["all_gather"], np.concatenate(ys))
        assert np.array_equal(out["gather"], np.concatenate(ys)) if r == root else out["gather"] is None
        assert np.array_equal(out["scatter"], xs[root][lo:hi])
        assert all(np.array_equal(a, ys[s] + 10 * r) for s, a in enumerate(out["all_to_all"]))
        assert out["scalars"].tolist() == list(range(n))


# ---------------------------------------------------------------------- bytes, messages, rounds


def moved(program, n, **options):
    return simulate(program, ranks=n, **options)


def log2_up(n):
    return (n - 1).bit_length()


def log2_down(n):
    return n.bit_length() - 1


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("make", [np.ones, phantom])
def test_ring_all_reduce_moves_what_the_formula_says(n, make):
    S = 8 * 30 * n
    run = moved(lambda comm: comm.all_reduce(make(30 * n, np.float64)), n)
    assert run.bytes_sent.tolist() == [2 * S * (n - 1) // n] * n == run.bytes_received.tolist()
    assert run.traffic.count == 2 * (n - 1) * n
    assert run.rounds == 2 * (n - 1)


@pytest.mark.parametrize("n", SIZES[1:])
def test_ring_all_reduce_of_a_size_that_does_not_divide(n):
    length = 10 * n + n // 2
    run = moved(lambda comm: comm.all_reduce(np.ones(length)), n)
    sizes = np.diff(chunk_bounds(length, n)) * 8
    want = [
        2 * sizes.sum() - sizes[r] - sizes[(r + 1) % n] for r in range(n)
    ]  # all but r, then all but r + 1
    assert run.bytes_sent.tolist() == want
    assert run.traffic.bytes == 2 * (n - 1) * length * 8  # the total is exact whatever divides


@pytest.mark.parametrize("n", SIZES)
def test_tree_all_reduce(n):
    run = moved(lambda comm: comm.all_reduce(np.ones(7), algorithm="tree"), n)
    assert run.traffic.count == 2 * (n - 1) and run.traffic.bytes == 2 * (n - 1) * 56
    assert run.rounds == 2 * log2_down(
        n
    )  # the longest chain; rank 0's ports are passed log2_up(n) times each way
    assert run.bytes_received[0] == log2_up(n) * 56
    assert run.bytes_sent.max(initial=0) == log2_up(n) * 56  # the root sends once a round on the way down


@pytest.mark.parametrize("n", SIZES)
def test_naive_all_reduce(n):
    run = moved(lambda comm: comm.all_reduce(np.ones(7), algorithm="naive"), n)
    assert run.bytes_sent.tolist() == [56 * (n - 1)] + [56] * (n - 1)
    assert run.bytes_received.tolist() == [56 * (n - 1)] + [56] * (n - 1)
    assert run.rounds == (2 if n > 1 else 0)


@pytest.mark.parametrize("n", SIZES)
def test_halving_doubling_all_reduce(n):
    core = 1 << (n.bit_length() - 1)
    S = 8 * core * 3
    run = moved(lambda comm: comm.all_reduce(np.ones(core * 3), algorithm="halving_doubling"), n)
    inner = 2 * S * (core - 1) // core
    extra = n - core
    want = [S if r % 2 == 0 else inner + S for r in range(2 * extra)] + [inner] * (n - 2 * extra)
    assert run.bytes_sent.tolist() == want
    assert run.rounds == 2 * int(math.log2(core)) + (2 if extra else 0)
    assert run.traffic.count == core * 2 * int(math.log2(core)) + 2 * extra


@pytest.mark.parametrize("nodes, local", [(1, 4), (2, 2), (2, 8), (3, 4), (4, 1)])
def test_hierarchical_all_reduce(nodes, local):
    n, S = nodes * local, 8 * nodes * local * 3
    run = simulate(
        lambda c: c.all_reduce(np.ones(S // 8), algorithm="hierarchical"), cluster=Cluster(nodes, local)
    )
    within = 2 * S * (local - 1) // local
    across = 2 * (S // local) * (nodes - 1) // nodes
    assert run.bytes_sent.tolist() == [within + across] * n
    assert run.traffic.where(tier=0).sent().tolist() == [within] * n
    assert run.traffic.where(tier=1).sent().tolist() == [across] * n
    assert run.rounds == 2 * (local - 1) + 2 * (nodes - 1)


@pytest.mark.parametrize("n", SIZES)
def test_all_reduce_is_reduce_scatter_then_all_gather(n):
    x = np.arange(5.0 * n + 3)

    def once(comm):
        return comm.all_reduce(x + comm.rank)

    def twice(comm):
        return comm.all_gather(comm.reduce_scatter(x + comm.rank))

    a, b = moved(once, n), moved(twice, n)
    assert all(np.array_equal(p, q) for p, q in zip(a.results, b.results))
    assert a.bytes_sent.tolist() == b.bytes_sent.tolist() and a.rounds == b.rounds
    assert a.ends == b.ends


@pytest.mark.parametrize("n", SIZES)
def test_the_other_collectives_move_what_the_formulas_say(n):
    S = 8 * 6 * n
    x = np.ones(6 * n)
    share = S * (n - 1) // n
    cases = {  # bytes of each rank, messages in all, rounds
        "reduce_scatter": (lambda c: c.reduce_scatter(x), [share] * n, n * (n - 1), n - 1),
        "all_gather": (lambda c: c.all_gather(x[:6]), [share] * n, n * (n - 1), n - 1),
        "all_to_all": (lambda c: c.all_to_all([x[:6]] * n), [share] * n, n * (n - 1), n - 1),
        "gather": (lambda c: c.gather(x), [0] + [S] * (n - 1), n - 1, min(n - 1, 1)),
        "scatter": (lambda c: c.scatter(x), [share] + [0] * (n - 1), n - 1, min(n - 1, 1)),
        "flat broadcast": (
            lambda c: c.broadcast(x, algorithm="flat"),
            [S * (n - 1)] + [0] * (n - 1),
            n - 1,
            min(n - 1, 1),
        ),
        "flat reduce": (lambda c: c.reduce(x, algorithm="flat"), [0] + [S] * (n - 1), n - 1, min(n - 1, 1)),
        "reduce": (lambda c: c.reduce(x), [0] + [S] * (n - 1), n - 1, log2_down(n)),
        "broadcast": (lambda c: c.broadcast(x), None, n - 1, log2_down(n)),
        "barrier": (lambda c: c.barrier(), [0] * n, n * log2_up(n), log2_up(n)),
    }
    for name, (program, sent, messages, rounds) in cases.items():
        run = moved(program, n)
        if sent is not None:
            assert run.bytes_sent.tolist() == sent, name
        assert run.traffic.count == messages, name
        assert run.rounds == rounds, name
    run = moved(lambda c: c.broadcast(x), n)
    assert run.traffic.bytes == (n - 1) * S and (run.bytes_received > 0).sum() == n - 1


@pytest.mark.parametrize("name", ALL_REDUCE_STEPS)
@pytest.mark.parametrize("n", SIZES)
def test_steps_fit_together(name, n):
    """Every send of a chunk to a rank has its receive of that chunk there, in the same order."""
    nodes, local = NODES[n]
    layout = [list(range(i * local, (i + 1) * local)) for i in range(nodes)]
    sends, receives = {}, {}
    for rank in range(n):
        chunks, steps = ALL_REDUCE_STEPS[name](rank, n, layout)
        for s in steps:
            if s.dst is not None:
                assert s.dst != rank and 0 <= s.send[0] <= s.send[1] <= chunks
                sends.setdefault((rank, s.dst), []).append(s.send)
            if s.src is not None:
                receives.setdefault((s.src, rank), []).append(s.recv)
    assert sends == receives


@pytest.mark.parametrize("latency", [0.0, 1e6])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling", "naive"])
def test_no_latency_and_much_of_it(algorithm, latency):
    n, S = 8, 800
    run = simulate(
        lambda c: c.all_reduce(np.ones(S // 8), algorithm=algorithm),
        cluster=Cluster.flat(n, latency=latency, bandwidth=1.0),
    )
    wire = {
        "ring": 14 * 104,
        "tree": 6 * S,
        "halving_doubling": 2 * (n - 1) * S / n,
        "naive": 2 * (n - 1) * S,
    }[algorithm]
    steps = {"ring": 14, "tree": 6, "halving_doubling": 6, "naive": 2}[algorithm]
    # 100 elements in 8 chunks: the ring's steps carry 13 elements at some rank, hence an upper bound
    assert run.seconds == pytest.approx(wire + steps * latency, rel=0.1 if algorithm != "naive" else 1e-12)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_exact_times_when_all_divides(n):
    cluster = Cluster.flat(n, latency=2.0, bandwidth=4.0)
    S = 8 * 4 * n

    def program(comm, algorithm):
        return comm.all_reduce(np.ones(4 * n), algorithm=algorithm)

    times = {a: simulate(program, cluster=cluster, algorithm=a).seconds for a in MOVED}
    assert times["ring"] == 2 * (n - 1) * (2 + S / n / 4)
    assert times["tree"] == 2 * math.log2(n) * (2 + S / 4)
    assert times["halving_doubling"] == 2 * math.log2(n) * 2 + 2 * (n - 1) / n * S / 4
    assert times["naive"] == 2 * (2 + (n - 1) * S / 4)
