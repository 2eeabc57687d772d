"""Lab of chapter 2: collectives of your own. The README has the rules; `comm` is a rank's communicator.

Write the rank programs with isend, recv (irecv, send) and group: no collective of `comm` may be called.
"""

import numpy as np  # noqa: F401


def reduce_scatter_v(comm, x, counts):
    """This rank's part of the sum of all ranks' vectors; rank r gets counts[r] elements. A ring.

    Args:
        comm: the communicator, of N ranks.
        x: shape (L,), the same length on all ranks.
        counts: N numbers, 0 or more, that add up to L; the same on all ranks.

    Returns: array of shape (counts[rank],).

    Raises: ValueError if counts don't fit.
    """
    raise NotImplementedError(
        "reduce_scatter_v: the ring doesn't need equal chunks, only that all ranks cut alike. Which chunk must rank r "
        "send first, so that its own comes home last?"
    )


def all_gather_v(comm, part, counts):
    """All ranks' parts, one after the other, on every rank. A ring.

    Args:
        part: shape (counts[rank],).
        counts: as in `reduce_scatter_v`.

    Returns: array of shape (sum of counts,).
    """
    raise NotImplementedError("all_gather_v: each rank passes on, N - 1 times, what it got last")


def chain_broadcast(comm, x, src, pieces):
    """Rank src's vector on every rank, handed from rank to rank in pieces.

    Args:
        x: shape (L,) on rank src, None on the others.
        src: whose.
        pieces: how many, 1 or more, of nearly equal size. Some may be empty.
    """
    raise NotImplementedError(
        "chain_broadcast: src, src + 1, ... around; hand piece i on before piece i + 1 has come, and don't wait for "
        "your neighbour to have it"
    )


def chain_seconds(size, ranks, pieces, alpha, beta):
    """Predicted seconds of `chain_broadcast`, all pieces equal.

    Args:
        size: bytes of the vector.
        alpha, beta: latency in seconds and bandwidth in bytes per second of every link. A message of s bytes keeps the
            sender's port for s/beta and arrives alpha later.
    """
    raise NotImplementedError(
        "chain_seconds: when does the first piece reach the last rank, and how far behind is the last?"
    )


def enough_pieces(size, ranks, alpha, beta, slack):
    """The smallest number of pieces with which the chain takes at most 1 + slack times its limit for ever more pieces.

    Args:
        slack: e.g. 0.05.
    """
    raise NotImplementedError(
        "enough_pieces: let pieces go to infinity in chain_seconds; what is left over, for p pieces?"
    )


def bruck_all_to_all(comm, blocks):
    """Row r of the result is what rank r had for this rank. ceil(log2 N) rounds.

    Args:
        blocks: shape (N, k); row r is for rank r.

    Returns: array of shape (N, k).
    """
    raise NotImplementedError(
        "bruck_all_to_all: a row has to travel some number of ranks to the right; its binary digits say in which rounds"
    )


def hierarchical_all_reduce(comm, x, per_node):
    """The sum of all ranks' vectors on every rank; the last node may have fewer ranks than the others.

    Args:
        x: shape (L,).
        per_node: ranks 0 to per_node - 1 are on the first node, and so on; what is left is the last node.
    """
    raise NotImplementedError(
        "hierarchical_all_reduce: only as many ranks as the smallest node has can have a partner in every node; let "
        "those carry the sums across, a chunk each"
    )


def hierarchical_seconds(size, nodes, per_node, inside, across):
    """Predicted seconds of the chapter's hierarchical all-reduce, all nodes full.

    Args:
        size: bytes of each rank's vector.
        inside, across: (alpha, beta) of a link within a node and between nodes.
    """
    raise NotImplementedError("hierarchical_seconds: three rings in turn; how large is a chunk in each?")
