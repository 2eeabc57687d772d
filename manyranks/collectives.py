# Generated from chapters/02_collectives.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Collectives as rank programs: the naive, pass-around, ring and hierarchical all-reduce, and what they cost."""

from collections.abc import Sequence

import numpy as np

from manyranks.runtime import Array, Comm, chunk_bounds

__all__ = [
    "all_reduce_sweep",
    "hierarchical_all_reduce",
    "naive_all_reduce",
    "pass_around_all_reduce",
    "quickest",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_all_reduce_cost",
    "ring_all_reduce_seconds",
    "ring_reduce_scatter",
    "split",
    "tree_ring_crossover",
]


def naive_all_reduce(comm: Comm, x: Array) -> Array:
    """The sum of all ranks' arrays on every rank, by way of rank 0.

    Rank 0 receives and sends (N - 1)·S bytes; everybody else S.

    Args:
        comm: the communicator, of N ranks.
        x: array of any shape, the same on all ranks; S bytes.

    Returns: array of the shape of `x`.

    >>> from manyranks import simulate
    >>> simulate(naive_all_reduce, inputs=[np.ones(3), np.ones(3) * 2]).results
    [array([3., 3., 3.]), array([3., 3., 3.])]
    """
    if comm.rank == 0:
        total = comm.copy(x)
        for other in range(1, comm.size):
            total = total + comm.recv(other)
        for other in range(1, comm.size):
            comm.send(total, other)
        return total
    comm.send(x, 0)
    return comm.recv(0)


def pass_around_all_reduce(comm: Comm, x: Array) -> Array:
    """The sum of all ranks' arrays on every rank, by sending whole arrays around a circle.

    N - 1 steps, and every rank sends (N - 1)·S bytes. There is no hotspot, and in all
    it is N/2 times the bytes of the naive way.

    Args:
        comm: the communicator, of N ranks.
        x: array of any shape, the same on all ranks; S bytes.

    Returns: array of the shape of `x`.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    total, passing = comm.copy(x), x
    for _ in range(comm.size - 1):
        going = comm.isend(passing, right)
        passing = comm.recv(left)
        going.wait()
        total = total + passing
    return total


def split(x: Array, parts: int) -> list[Array]:
    """Cut a flat array into `parts` nearly equal chunks.

    Args:
        x: array of shape (length,).
        parts: how many chunks, 1 or more.

    Returns: a list of `parts` views of `x`. Their lengths differ by one at most, the
    longer ones come first, and some are empty if there are fewer elements than parts.

    >>> [chunk.tolist() for chunk in split(np.arange(7), 3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    bounds = chunk_bounds(len(x), parts)
    return [x[start:stop] for start, stop in zip(bounds, bounds[1:])]


def ring_reduce_scatter(comm: Comm, chunks: list[Array]) -> None:
    """Sum chunk r of all ranks on rank r, in place, in N - 1 steps around the ring.

    Args:
        comm: the communicator, of N ranks.
        chunks: this rank's array as a list of N chunks. Afterwards
            ``chunks[comm.rank]`` is the finished sum; the others hold partial sums.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        sending = (comm.rank - step - 1) % comm.size
        receiving = (sending - 1) % comm.size
        going = comm.isend(chunks[sending], right)
        chunks[receiving] += comm.recv(left)
        going.wait()
        comm.record("chunks", chunks)


def ring_all_gather(comm: Comm, chunks: list[Array]) -> None:
    """Copy chunk r of rank r to all ranks, in place, in N - 1 steps around the ring.

    Args:
        comm: the communicator, of N ranks.
        chunks: list of N chunks, of which ``chunks[comm.rank]`` counts. Afterwards all
            do.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        sending = (comm.rank - step) % comm.size
        receiving = (sending - 1) % comm.size
        going = comm.isend(chunks[sending], right)
        chunks[receiving][:] = comm.recv(left)
        going.wait()
        comm.record("chunks", chunks)


def ring_all_reduce(comm: Comm, x: Array) -> Array:
    """The sum of all ranks' arrays on every rank, by the ring algorithm.

    Patarasuk and Yuan, 2009. It takes 2(N - 1) steps; each rank sends 2·S·(N - 1)/N
    bytes, if N divides the number of elements.

    Args:
        comm: the communicator, of N ranks.
        x: array of any shape, the same on all ranks; S bytes. It is not changed.

    Returns: array of the shape of `x`.

    >>> from manyranks import simulate
    >>> run = simulate(ring_all_reduce, inputs=[np.arange(4), np.arange(4) * 10])
    >>> run.results[0]
    array([ 0, 11, 22, 33])
    """
    flat = comm.copy(x).reshape((-1,))
    chunks = split(flat, comm.size)  # views: what happens to a chunk happens to `flat`
    comm.record("chunks", chunks)
    ring_reduce_scatter(comm, chunks)
    ring_all_gather(comm, chunks)
    return flat.reshape(tuple(x.shape))


def ring_all_reduce_cost(size: float, ranks: int) -> tuple[int, float]:
    """Steps, and bytes that each rank sends, in a ring all-reduce.

    Args:
        size: bytes of each rank's array.
        ranks: N, 1 or more.

    Returns: (steps, bytes per rank); (0, 0.0) for a single rank.

    >>> ring_all_reduce_cost(14e9, 8)
    (14, 24500000000.0)
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    return 2 * (ranks - 1), 2 * size * (ranks - 1) / ranks


def ring_all_reduce_seconds(size: float, ranks: int, alpha: float, beta: float) -> float:
    """Predicted time of a ring all-reduce on links that are all alike.

    Args:
        size: bytes of each rank's array.
        ranks: N, 1 or more.
        alpha: latency of a message, in seconds.
        beta: bandwidth of a link, in bytes per second, one way.

    Returns: seconds.

    >>> round(ring_all_reduce_seconds(8e6, 8, alpha=1e-6, beta=100e9) * 1e6, 3)
    154.0
    """
    steps, sent = ring_all_reduce_cost(size, ranks)
    return steps * alpha + sent / beta


def tree_ring_crossover(ranks: int, alpha: float, beta: float) -> float:
    """The message size at which tree and ring all-reduce are predicted to take the same time.

    Below it the tree is faster, above it the ring.

    Args:
        ranks: N, a power of two and 4 or more: for others the tree's formula is only a
            bound.
        alpha: latency of a message, in seconds.
        beta: bandwidth of a link, in bytes per second.

    Returns: bytes.

    >>> round(tree_ring_crossover(16, alpha=1e-6, beta=100e9))
    359184
    """
    rounds = ranks.bit_length() - 1
    if ranks < 4 or ranks != 1 << rounds:
        raise ValueError(f"ranks must be a power of two, 4 or more, got {ranks}")
    return alpha * beta * (ranks - 1 - rounds) / (rounds - (ranks - 1) / ranks)


def hierarchical_all_reduce(comm: Comm, x: Array, per_node: int) -> Array:
    """The sum of all ranks' arrays on every rank: in the node, across nodes, in the node.

    Args:
        comm: the communicator; ranks 0 to per_node - 1 are on the first node, and so
            on.
        x: array of any shape, the same on all ranks; S bytes.
        per_node: ranks on a node; it has to divide ``comm.size``.

    Returns: array of the shape of `x`. Each rank sends 2·S·(per_node - 1)/per_node
    bytes inside its node and, across nodes, only 2·(S/per_node)·(nodes - 1)/nodes.
    """
    if comm.size % per_node:
        raise ValueError(f"per_node must divide the {comm.size} ranks, got {per_node}")
    node, local = divmod(comm.rank, per_node)
    inside = comm.group(range(node * per_node, (node + 1) * per_node))
    across = comm.group(range(local, comm.size, per_node))
    flat = comm.copy(x).reshape((-1,))
    chunks = split(flat, per_node)
    ring_reduce_scatter(inside, chunks)
    chunks[local][:] = ring_all_reduce(across, chunks[local])
    ring_all_gather(inside, chunks)
    return flat.reshape(tuple(x.shape))


def all_reduce_sweep(
    comm: Comm,
    buffer: Array,
    lengths: Sequence[int],
    repeats: int = 7,
    algorithm: str = "ours",
) -> list[list[float]]:
    """Time an all-reduce over a range of lengths; a rank program.

    Args:
        comm: the communicator.
        buffer: array of shape (at least the largest length,), the same on all ranks.
        lengths: numbers of elements to try.
        repeats: timed repetitions of each; one more warms up.
        algorithm: "ours" for `ring_all_reduce`, or what ``comm.all_reduce`` takes
            ("auto" is the backend's own).

    Returns: this rank's seconds, a list of `repeats` for each length. See `quickest`.
    """
    seconds = []
    for length in lengths:
        x, times = buffer[:length], []
        for _ in range(repeats + 1):
            comm.barrier()
            began = comm.time()
            if algorithm == "ours":
                ring_all_reduce(comm, x)
            else:
                comm.all_reduce(x, algorithm=algorithm)
            times.append(comm.time() - began)
        seconds.append(times[1:])
    return seconds


def quickest(results: Sequence) -> np.ndarray:
    """What a collective took at best.

    Of each repetition the slowest rank's time counts, and of these the least.

    Args:
        results: one rank's `all_reduce_sweep` result after the other; shape (ranks,
            lengths, repeats), seconds.

    Returns: array of shape (lengths,), seconds.

    >>> quickest([[[1.0, 2.0, 9.0]], [[3.0, 1.0, 1.0]]])
    array([2.])
    """
    return np.min(np.max(np.array(results), axis=0), axis=-1)
