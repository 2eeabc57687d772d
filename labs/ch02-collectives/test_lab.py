"""Tests of the lab of chapter 2. LAB_MODULE=solution tests solution.py instead of lab.py."""

import importlib
import os

import numpy as np
import pytest

from manyranks import Cluster, simulate
from manyranks.collectives import hierarchical_all_reduce as chapters_hierarchy
from manyranks.runtime import RankError

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))


def vectors(ranks, length, salt=0):
    """Whole numbers as floats, others on each rank: their sums are exact in any order."""
    rng = np.random.default_rng([SEED, salt, ranks, length])
    return [rng.integers(-99, 100, length).astype(float) for _ in range(ranks)]


def random_counts(ranks, salt=0):
    return [int(c) for c in np.random.default_rng([SEED, salt, ranks]).integers(0, 6, ranks)]


COUNTS = [
    [7],
    [2, 5],
    [4, 0, 3],
    [0, 0, 6],
    [1, 2, 3, 4],
    [0, 1, 0, 0, 1],
    random_counts(3),
    random_counts(5),
]


def by_hand(run):
    """The program's own messages; fails if there are any of a collective."""
    others = {m.call for m in run.traffic} - {"send"}
    assert not others, f"messages of {others}: write it with isend and recv"
    return list(run.traffic)


def neighbours_only(run, case):
    """All messages go round one way, from neighbour to neighbour."""
    n = run.ranks
    ways = {(m.destination - m.source) % n for m in by_hand(run)}
    assert ways in (set(), {1}, {n - 1}), (
        f"{case}: messages go {sorted(ways)} ranks far; in a ring all go to one neighbour"
    )


# ---------------------------------------------------------------------------- uneven rings


@pytest.mark.points(10)
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum():
    """Rank r gets its counts[r] elements of the sum, some of them none."""
    for counts in COUNTS:
        xs = vectors(len(counts), sum(counts))
        ends = np.cumsum(counts)
        run = simulate(lab.reduce_scatter_v, inputs=xs, counts=counts)
        by_hand(run)
        for r, found in enumerate(run.results):
            wanted = sum(xs)[ends[r] - counts[r] : ends[r]]
            assert np.array_equal(found, wanted), (
                f"counts {counts}: rank {r} has {found}, expected {wanted}. Does a chunk visit every rank once and end "
                "where it belongs?"
            )


@pytest.mark.points(8)
def test_reduce_scatter_sends_all_but_its_own():
    """N - 1 rounds around the ring; each rank sends every chunk but its own, once."""
    for counts in COUNTS:
        n, length = len(counts), sum(counts)
        run = simulate(lab.reduce_scatter_v, inputs=vectors(n, length), counts=counts)
        neighbours_only(run, f"counts {counts}")
        assert run.rounds <= n - 1, f"counts {counts}: {run.rounds} rounds, N-1 = {n - 1} are enough"
        wanted = [8 * (length - c) for c in counts]
        assert run.bytes_sent.tolist() == wanted, (
            f"counts {counts}: bytes sent by rank {run.bytes_sent.tolist()}, expected {wanted}: 8 bytes for each element "
            "that isn't one's own"
        )


@pytest.mark.points(7)
def test_all_gather_puts_the_parts_together():
    """Every rank ends with all parts in rank order, some of them empty."""
    for counts in COUNTS:
        whole = vectors(1, sum(counts), 1)[0]
        parts = np.split(whole, np.cumsum(counts)[:-1])
        run = simulate(lab.all_gather_v, inputs=parts, counts=counts)
        by_hand(run)
        for r, found in enumerate(run.results):
            assert np.array_equal(found, whole), f"counts {counts}: rank {r} has {found}, expected {whole}"


@pytest.mark.points(5)
def test_all_gather_is_a_ring():
    """N - 1 rounds, and each part is sent N - 1 times in all."""
    for counts in COUNTS:
        n = len(counts)
        parts = np.split(vectors(1, sum(counts), 1)[0], np.cumsum(counts)[:-1])
        run = simulate(lab.all_gather_v, inputs=parts, counts=counts)
        neighbours_only(run, f"counts {counts}")
        assert run.rounds <= n - 1, f"counts {counts}: {run.rounds} rounds, N-1 = {n - 1} are enough"
        sent = int(run.bytes_sent.sum())
        assert sent == 8 * (n - 1) * sum(counts), (
            f"counts {counts}: {sent} bytes, expected {8 * (n - 1) * sum(counts)}"
        )


@pytest.mark.points(4)
def test_counts_that_do_not_fit_are_refused():
    """ValueError on the ranks for counts of a wrong number, a wrong sum, or below 0."""
    for counts in ([3, 3], [2, 2, 1], [7, -1, 0]):
        with pytest.raises(RankError) as error:
            simulate(lab.reduce_scatter_v, inputs=vectors(3, 6), counts=counts)
        assert "ValueError" in str(error.value), (
            f"counts {counts} for 6 elements on 3 ranks: {error.value.summary}"
        )
        with pytest.raises(RankError) as error:
            simulate(lab.all_gather_v, inputs=vectors(3, 2), counts=counts)
        assert "ValueError" in str(error.value), (
            f"counts {counts} for parts of 2 elements on each of 3 ranks: {error.value.summary}"
        )


# ---------------------------------------------------------------------------- the chain


@pytest.mark.points(7)
def test_chain_broadcast_reaches_everybody():
    """From any rank, in any number of pieces, with the last ones shorter or empty."""
    for ranks, src, length, pieces in (
        (1, 0, 5, 2),
        (2, 1, 5, 1),
        (3, 0, 7, 3),
        (4, 2, 10, 4),
        (5, 4, 3, 6),
        (4, 1, 0, 2),
    ):
        whole = vectors(1, length, 2)[0]
        run = simulate(
            lab.chain_broadcast,
            inputs=[whole if r == src else None for r in range(ranks)],
            src=src,
            pieces=pieces,
        )
        by_hand(run)
        case = f"{ranks} ranks, {length} elements from rank {src} in {pieces} pieces"
        for r, found in enumerate(run.results):
            assert np.array_equal(found, whole), f"{case}: rank {r} has {found}, expected {whole}"
        sent = run.bytes_sent
        assert sent.max() <= 8 * length and sent.sum() == 8 * length * (ranks - 1), (
            f"{case}: bytes sent by rank {sent.tolist()}; in a chain each rank but the last sends the vector once"
        )


@pytest.mark.points(7)
def test_chain_is_pipelined():
    """While one piece travels on, the next one follows: the virtual clock shows it."""
    for ranks, pieces in ((6, 1), (6, 10), (3, 25)):
        network = Cluster.flat(ranks, latency=2e-6, bandwidth=1e9)
        data = [vectors(1, 7500)[0]] + [None] * (ranks - 1)  # 60 us on a link
        run = simulate(lab.chain_broadcast, inputs=data, cluster=network, src=0, pieces=pieces)
        limit = (ranks - 1) * 2e-6 + 60e-6 * (1 + (ranks - 2) / pieces)
        assert run.seconds <= limit * 1.01, (
            f"{ranks} ranks, {pieces} pieces: {run.seconds * 1e6:.1f} us, {limit * 1e6:.1f} are possible: pass a piece "
            "on as soon as it is there"
        )


def chain_cases():
    rng = np.random.default_rng([SEED, 3])
    for _ in range(6):
        size, ranks, pieces = (int(n) for n in rng.integers([10**4, 2, 1], [10**7, 20, 50]))
        yield size, ranks, pieces, float(rng.uniform(1e-6, 2e-5)), float(rng.uniform(1e9, 1e11))


@pytest.mark.points(5)
def test_chain_seconds():
    """The prediction agrees with a simulated chain."""

    def chain(comm, pieces, sizes):
        going = []
        for size in sizes:
            x = np.zeros(size, np.uint8) if comm.rank == 0 else comm.recv(comm.rank - 1)
            if comm.rank < comm.size - 1:
                going.append(comm.isend(x, comm.rank + 1))
        for work in going:
            work.wait()

    for ranks, pieces in ((1, 4), (2, 1), (2, 6), (5, 1), (5, 8), (8, 3)):
        size, alpha, beta = 24000, 3e-6, 1e9
        network = Cluster.flat(ranks, latency=alpha, bandwidth=beta)
        run = simulate(chain, cluster=network, pieces=pieces, sizes=[size // pieces] * pieces)
        found = lab.chain_seconds(size, ranks, pieces, alpha, beta)
        assert found == pytest.approx(run.seconds, rel=1e-6, abs=1e-12), (
            f"{ranks} ranks, {pieces} pieces: predicted {found * 1e6:.2f} us, simulated {run.seconds * 1e6:.2f}"
        )
    with pytest.raises(ValueError):
        lab.chain_seconds(24000, 5, 0, 1e-6, 1e9)


@pytest.mark.points(5)
def test_enough_pieces():
    """By the right prediction the answer is within the slack, and one piece fewer isn't."""
    for size, ranks, _, alpha, beta in chain_cases():
        for slack in (0.3, 0.02):
            p = lab.enough_pieces(size, ranks, alpha, beta, slack)
            assert p == int(p) and p >= 1, f"a whole number of pieces, 1 or more, not {p}"
            limit = (ranks - 1) * alpha + size / beta

            def over(pieces, more=(ranks - 2) * size / beta / limit):
                return more / pieces

            case = f"{size} bytes, {ranks} ranks, slack {slack}"
            assert over(p) <= slack * (1 + 1e-6), (
                f"{case}: with {p} pieces it is {over(p):.4f} over the limit"
            )
            assert p == 1 or over(p - 1) > slack * (1 - 1e-6), (
                f"{case}: {p - 1} pieces are enough: {over(p - 1):.4f}"
            )
    assert lab.enough_pieces(10**6, 1, 1e-6, 1e9, 0.1) == 1, "a single rank has nothing to send"


# ---------------------------------------------------------------------------- all to all


@pytest.mark.points(9)
def test_bruck_delivers_every_row():
    """Row r of the result is what rank r had for this rank, for any number of ranks."""
    for n, k in ((1, 2), (2, 3), (3, 1), (4, 2), (5, 2), (7, 1), (8, 1)):
        sent = np.random.default_rng([SEED, n]).permutation(n * n * k).reshape(n, n, k).astype(float)
        run = simulate(lab.bruck_all_to_all, inputs=list(sent))
        by_hand(run)
        for r, found in enumerate(run.results):
            assert np.array_equal(found, sent[:, r]), (
                f"{n} ranks: rank {r} has\n{found}\nexpected row s from rank s:\n{sent[:, r]}\nAfter the last round, how far "
                "has row i come?"
            )


@pytest.mark.points(8)
def test_bruck_takes_logarithmically_many_rounds():
    """ceil(log2 N) rounds, and in each only the rows whose bit is set."""
    for n in (2, 3, 5, 6, 8):
        run = simulate(lab.bruck_all_to_all, inputs=[np.ones((n, 3)) * r for r in range(n)])
        by_hand(run)
        bits = (n - 1).bit_length()
        assert run.rounds <= bits, (
            f"{n} ranks: {run.rounds} rounds, expected {bits}: distances double from round to round"
        )
        messages = max(sum(m.source == r for m in run.traffic) for r in range(n))
        assert messages <= bits, (
            f"{n} ranks: a rank sends {messages} messages, one a round are enough: {bits}"
        )
        most = 24 * sum(bin(i).count("1") for i in range(n))
        assert run.bytes_sent.max() <= most, (
            f"{n} ranks: {run.bytes_sent.max()} bytes from a rank, {most} are enough"
        )


# ---------------------------------------------------------------------------- hierarchies

NODES = [
    (1, 1, 5),
    (3, 4, 6),
    (4, 2, 7),
    (5, 2, 9),
    (5, 3, 8),
    (7, 4, 11),
    (7, 3, 2),
    (8, 4, 16),
]  # ranks, per node, length


@pytest.mark.points(9)
def test_hierarchy_gives_every_rank_the_sum():
    """The sum on every rank, with a last node that may have fewer ranks."""
    for ranks, per_node, length in NODES:
        xs = vectors(ranks, length, 4)
        run = simulate(lab.hierarchical_all_reduce, inputs=xs, per_node=per_node)
        by_hand(run)
        for r, found in enumerate(run.results):
            assert np.array_equal(found, sum(xs)), (
                f"{ranks} ranks, nodes of {per_node}, {length} elements: rank {r} has {found}, the sum is {sum(xs)}"
            )


def on_nodes(ranks, per_node, length):
    nodes = -(-ranks // per_node)
    cluster = Cluster(nodes=nodes, gpus_per_node=per_node, gpu="H100")
    xs = vectors(ranks, length, 5)
    return simulate(
        lab.hierarchical_all_reduce, ranks=ranks, inputs=xs, cluster=cluster, per_node=per_node
    ), nodes


@pytest.mark.points(6)
def test_hierarchy_spares_the_network():
    """Across nodes 2S(nodes - 1) bytes in all, spread over as many cards as the smallest node has."""
    for ranks, per_node, length in ((7, 4, 60), (5, 3, 60), (8, 4, 64), (8, 3, 60)):
        run, nodes = on_nodes(ranks, per_node, length)
        sent = run.traffic.where(tier=1).sent()
        carriers = ranks - per_node * (nodes - 1)
        whole, most = 2 * 8 * length * (nodes - 1), 2 * 8 * -(-length // carriers) * (nodes - 1) / nodes
        case = f"{ranks} ranks on nodes of {per_node}"
        assert sent.sum() <= whole, (
            f"{case}: {sent.sum()} bytes cross, {whole} are enough: sum up in the node first"
        )
        assert sent.max() <= most * 1.1, (
            f"{case}: one card sends {sent.max()} bytes across, {most:.0f} are enough: let {carriers} ranks of each node "
            "carry a chunk each, over a ring"
        )


@pytest.mark.points(4)
def test_hierarchy_sends_no_more_than_needed_in_the_node():
    """Within a node of g ranks 2S(g - 1) bytes in all."""
    for ranks, per_node, length in ((7, 4, 60), (5, 3, 60), (8, 4, 64), (4, 4, 60)):
        run, nodes = on_nodes(ranks, per_node, length)
        sent = int(run.traffic.where(tier=0).sent().sum())
        needed = 2 * 8 * length * (ranks - nodes)
        assert sent <= needed, (
            f"{ranks} ranks on nodes of {per_node}: {sent} bytes within the nodes, {needed} are enough"
        )


@pytest.mark.points(6)
def test_hierarchical_seconds():
    """The prediction agrees with the simulated clock of the chapter's hierarchy, small and large."""
    for nodes, per_node, chunk in ((1, 4, 500), (2, 1, 800), (2, 2, 1000), (3, 4, 100), (4, 2, 20000)):
        cluster = Cluster(nodes=nodes, gpus_per_node=per_node, gpu="H100")
        xs = [np.zeros(chunk * nodes * per_node) for _ in range(nodes * per_node)]
        run = simulate(chapters_hierarchy, cluster=cluster, inputs=xs, per_node=per_node)
        inside, across = ((t.latency, t.bandwidth) for t in (cluster.tiers[0], cluster.tiers[1]))
        found = lab.hierarchical_seconds(xs[0].nbytes, nodes, per_node, inside, across)
        assert found == pytest.approx(run.seconds, rel=1e-3), (
            f"{xs[0].nbytes} bytes on {nodes} nodes of {per_node}: predicted {found * 1e6:.2f} us, simulated "
            f"{run.seconds * 1e6:.2f}"
        )
