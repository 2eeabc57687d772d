"""Who sends which chunk to whom, and when: the collective algorithms as plain data.

A buffer is cut into chunks. An algorithm is, for every rank, a list of `Step`s: send a run of chunks to one
rank and, at the same time, receive a run of chunks from another, adding it to one's own or replacing it. The
same steps move real arrays, phantom arrays and simulated time, so what is counted is what was moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Step", "chunk_bounds", "ALL_REDUCE_STEPS"]

Span = tuple[int, int]  # first chunk, one past the last


class Step(NamedTuple):
    """One step of one rank. ``dst`` or ``src`` is None where the rank only receives or only sends.

    ``reduce`` says what happens to the chunks received: combined with the rank's own (True) or put in their place.
    """

    dst: int | None
    send: Span
    src: int | None
    recv: Span
    reduce: bool


def chunk_bounds(length: int, chunks: int) -> list[int]:
    """Where `chunks` nearly equal chunks of a sequence of `length` begin and end.

    Returns ``chunks + 1`` offsets; chunk i is ``[bounds[i], bounds[i + 1])``. Sizes differ by one at most, the
    longer ones come first (NumPy's ``array_split`` rule), and chunks are empty where there are fewer elements
    than chunks.

    >>> chunk_bounds(10, 4)
    [0, 3, 6, 8, 10]
    >>> chunk_bounds(2, 4)
    [0, 1, 2, 2, 2]
    """
    base, extra = divmod(length, chunks)
    return [i * base + min(i, extra) for i in range(chunks + 1)]


def ring_reduce_scatter(rank: int, n: int) -> Iterator[Step]:
    """n - 1 steps; afterwards rank r owns the reduced chunk r (Patarasuk and Yuan, 2009)."""
    right, left = (rank + 1) % n, (rank - 1) % n
    for k in range(n - 1):
        s, r = (rank - k - 1) % n, (rank - k - 2) % n
        yield Step(right, (s, s + 1), left, (r, r + 1), True)


def ring_all_gather(rank: int, n: int) -> Iterator[Step]:
    """n - 1 steps; rank r starts with chunk r, and everybody ends with all chunks."""
    right, left = (rank + 1) % n, (rank - 1) % n
    for k in range(n - 1):
        s, r = (rank - k) % n, (rank - k - 1) % n
        yield Step(right, (s, s + 1), left, (r, r + 1), False)


def ring(rank: int, n: int, nodes: list[list[int]]) -> tuple[int, Iterator[Step]]:
    """Ring all-reduce: 2(n - 1) steps, 2·S·(n - 1)/n bytes a rank."""

    def steps() -> Iterator[Step]:
        yield from ring_reduce_scatter(rank, n)
        yield from ring_all_gather(rank, n)

    return n, steps()


def binomial_reduce(rank: int, n: int, root: int = 0, span: Span = (0, 1)) -> Iterator[Step]:
    """Binomial tree towards `root`: the root receives ceil(log2 n) times, each edge carries the whole buffer once.

    No message has more than floor(log2 n) - 1 others to wait for: where n is no power of two, some subtrees are small.
    """
    me, bit = (rank - root) % n, 1
    while bit < n:
        if me & bit:
            yield Step((me - bit + root) % n, span, None, span, True)
            return
        if me + bit < n:
            yield Step(None, span, (me + bit + root) % n, span, True)
        bit *= 2


def binomial_broadcast(rank: int, n: int, root: int = 0, span: Span = (0, 1)) -> Iterator[Step]:
    """The binomial tree the other way: the root sends first to the farthest subtree."""
    me, bit = (rank - root) % n, 1
    while bit < n and not me & bit:
        bit *= 2
    if me:
        yield Step(None, span, (me - bit + root) % n, span, False)
    bit //= 2
    while bit:
        if me + bit < n:
            yield Step((me + bit + root) % n, span, None, span, False)
        bit //= 2


def tree(rank: int, n: int, nodes: list[list[int]]) -> tuple[int, Iterator[Step]]:
    """Binomial reduce to rank 0, then binomial broadcast: the whole buffer passes rank 0's ports ceil(log2 n) times
    each way, in 2·log2 n rounds when n is a power of two."""

    def steps() -> Iterator[Step]:
        yield from binomial_reduce(rank, n)
        yield from binomial_broadcast(rank, n)

    return 1, steps()


def flat_reduce(rank: int, n: int, root: int = 0) -> Iterator[Step]:
    """Everybody sends the whole buffer to the root."""
    for other in range(n):
        if other != root and rank in (root, other):
            yield Step(None, (0, 1), other, (0, 1), True) if rank == root else Step(root, (0, 1), None, (0, 1), True)


def flat_broadcast(rank: int, n: int, root: int = 0) -> Iterator[Step]:
    """The root sends the whole buffer to everybody, one after the other."""
    for other in range(n):
        if other != root and rank in (root, other):
            yield Step(other, (0, 1), None, (0, 1), False) if rank == root else Step(None, (0, 1), root, (0, 1), False)


def naive(rank: int, n: int, nodes: list[list[int]]) -> tuple[int, Iterator[Step]]:
    """All to rank 0, and back from rank 0: the hotspot."""

    def steps() -> Iterator[Step]:
        yield from flat_reduce(rank, n)
        yield from flat_broadcast(rank, n)

    return 1, steps()


def halving_doubling(rank: int, n: int, nodes: list[list[int]]) -> tuple[int, Iterator[Step]]:
    """Recursive halving reduce-scatter, recursive doubling all-gather (Thakur, Rabenseifner and Gropp, 2005).

    2·log2 n rounds and the ring's bytes when n is a power of two. Otherwise the n - 2^p surplus ranks first fold
    their buffer into a neighbour and get the result at the end, which costs two more rounds of the whole buffer.
    """
    core = 1 << (n.bit_length() - 1)
    extra = n - core  # ranks 0 .. 2*extra-1 pair up: even ones fold into the odd one above
    whole = (0, core)

    def real(c: int) -> int:
        return 2 * c + 1 if c < extra else c + extra

    def steps() -> Iterator[Step]:
        if rank < 2 * extra and rank % 2 == 0:
            yield Step(rank + 1, whole, None, whole, True)
            yield Step(None, whole, rank + 1, whole, False)
            return
        if rank < 2 * extra:
            yield Step(None, whole, rank - 1, whole, True)
        me = rank // 2 if rank < 2 * extra else rank - extra
        lo, hi, bit, kept = 0, core, core // 2, []
        while bit:
            mid, peer = (lo + hi) // 2, real(me ^ bit)
            mine, theirs = ((mid, hi), (lo, mid)) if me & bit else ((lo, mid), (mid, hi))
            yield Step(peer, theirs, peer, mine, True)
            kept.append((peer, mine, theirs))
            (lo, hi), bit = mine, bit // 2
        for peer, mine, theirs in reversed(kept):
            yield Step(peer, mine, peer, theirs, False)
        if rank < 2 * extra:
            yield Step(rank - 1, whole, None, whole, False)

    return core, steps()


def hierarchical(rank: int, n: int, nodes: list[list[int]]) -> tuple[int, Iterator[Step]]:
    """Ring reduce-scatter in the node, ring all-reduce across nodes on each rank's share, ring all-gather in the node.

    `nodes` lists the group's ranks node by node. Every node must hold the same number of them.
    """
    if len({len(members) for members in nodes}) != 1:
        held = sorted({len(members) for members in nodes})
        raise ValueError(f"algorithm='hierarchical' needs the same number of ranks on every node, got {held}")
    here = next(members for members in nodes if rank in members)
    m, local, across = len(nodes), len(here), [members[here.index(rank)] for members in nodes]
    me, my_node = here.index(rank), nodes.index(here)

    def within(steps: Iterator[Step]) -> Iterator[Step]:
        for s in steps:
            yield Step(here[s.dst], (s.send[0] * m, s.send[1] * m), here[s.src], (s.recv[0] * m, s.recv[1] * m), s.reduce)

    def between(steps: Iterator[Step]) -> Iterator[Step]:
        o = me * m
        for s in steps:
            yield Step(across[s.dst], (o + s.send[0], o + s.send[1]), across[s.src], (o + s.recv[0], o + s.recv[1]), s.reduce)

    def steps() -> Iterator[Step]:
        yield from within(ring_reduce_scatter(me, local))
        yield from between(ring_reduce_scatter(my_node, m))
        yield from between(ring_all_gather(my_node, m))
        yield from within(ring_all_gather(me, local))

    return local * m, steps()


#: name -> function(rank, n, nodes) -> (number of chunks, the rank's steps)
ALL_REDUCE_STEPS = {
    "naive": naive,
    "ring": ring,
    "tree": tree,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
}
