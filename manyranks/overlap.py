# Generated from chapters/08_overlap_and_frameworks.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Communication beside computing: what is exposed, read off a run or predicted; bucket sizes; the bandwidth that hides it; contention."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from manyranks.collectives import ring_all_reduce_cost, ring_all_reduce_seconds
from manyranks.runtime import Array, Comm, Run

__all__ = [
    "Exposure",
    "best_bucket",
    "contended_seconds",
    "covered",
    "exposed_seconds",
    "exposure",
    "hiding_bandwidth",
    "merged",
    "overlap_trial",
]


class Exposure(NamedTuple):
    """How a rank's time splits into computing and communication, in seconds.

    Attributes:
        computing: in which it computes.
        communicating: in which some communication of its is under way.
        exposed: in which communication is under way and it doesn't compute.
        idle: in which it does neither.
    """

    computing: float
    communicating: float
    exposed: float
    idle: float

    @property
    def hidden(self) -> float:
        """The part of the communication that is covered by computing, 0 to 1."""
        if not self.communicating:
            return 1.0
        return 1 - self.exposed / self.communicating


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps: disjoint intervals in order.

    >>> merged([(3, 5), (0, 1), (4, 6), (1, 2)])
    [(0, 2), (3, 6)]
    """
    out: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif end > start:
            out.append((start, end))
    return out


def covered(intervals: Iterable[tuple[float, float]], by: Iterable[tuple[float, float]]) -> float:
    """For how long both are the case: the length of the intersection of two unions.

    >>> covered([(0, 4), (3, 6)], by=[(1, 2), (5, 9)])
    2
    """
    a, b, total = merged(intervals), merged(by), 0
    i = j = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def exposure(run: Run, rank: int = 0) -> Exposure:
    """What is exposed of a rank's communication, read off its timeline.

    Args:
        run: what `simulate` returned. (On real hardware the timeline knows only when a
            rank waited, so that all communication would count as exposed.)
        rank: whose.

    >>> from manyranks import simulate
    >>> from manyranks.runtime import phantom
    >>> def program(comm, x):
    ...     work = comm.all_reduce(x, async_op=True)
    ...     comm.compute(seconds=1e-6)
    ...     return work.wait()
    >>> round(exposure(simulate(program, inputs=[phantom(1)] * 2)).hidden, 3)
    0.5
    """
    if not 0 <= rank < run.ranks:
        raise ValueError(f"rank must be from 0 to {run.ranks - 1}, got {rank}")
    mine = [i for i in run.timeline if i.rank == rank]
    computing = merged((i.start, i.end) for i in mine if i.kind == "compute")
    communicating = merged((i.start, i.end) for i in mine if i.kind != "compute")
    busy = sum(end - start for start, end in computing)
    under_way = sum(end - start for start, end in communicating)
    both = covered(communicating, by=computing)
    idle = max(0.0, run.seconds - busy - under_way + both)
    return Exposure(busy, under_way, under_way - both, idle)


def _check_step(size: float, backward: float, ranks: int, alpha: float, beta: float = 1.0) -> None:
    if not (size > 0 and backward > 0):
        raise ValueError(f"size and backward must be positive, got {size} and {backward}")
    if not (alpha >= 0 and beta > 0):
        raise ValueError(f"alpha must be 0 or more and beta positive, got {alpha} and {beta}")
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")


def exposed_seconds(
    size: float,
    backward: float,
    bucket: float,
    ranks: int,
    alpha: float,
    beta: float,
) -> float:
    """Predicted exposed part of a bucketed ring all-reduce beside the backward pass.

    Args:
        size: S, bytes of all gradients, which come evenly over the backward pass.
        backward: seconds of the backward pass.
        bucket: B, bytes of a bucket, of which S/B need not be a whole number; more than
            S counts as S, one bucket at the end.
        ranks: N.
        alpha: latency of a message, in seconds.
        beta: bandwidth of a link, in bytes per second.

    >>> round(exposed_seconds(3e9, 0.1, 1e8, 16, alpha=14e-6, beta=50e9) * 1e3, 2)
    28.43
    """
    _check_step(size, backward, ranks, alpha, beta)
    if bucket <= 0:
        raise ValueError(f"bucket must be a positive number of bytes, got {bucket}")
    if ranks == 1:
        return 0.0
    buckets = max(1.0, size / bucket)
    each = ring_all_reduce_seconds(size / buckets, ranks, alpha, beta)
    return max(each, backward / buckets + buckets * each - backward)


def best_bucket(size: float, backward: float, ranks: int, alpha: float, beta: float) -> float:
    """The bucket size that exposes least, in bytes; S if one bucket at the end is best.

    Args:
        size, backward, ranks, alpha, beta: as in `exposed_seconds`.

    >>> round(best_bucket(3e9, 0.1, 16, alpha=14e-6, beta=50e9) / 1e6, 1)
    194.4
    """
    _check_step(size, backward, ranks, alpha, beta)
    latency = 2 * (ranks - 1) * alpha
    spare = backward - (ring_all_reduce_cost(size, ranks)[1] / beta if ranks > 1 else 0)
    best = math.sqrt(latency / backward)
    if spare > 0:
        best = min(best, latency / spare)
    return size * min(1.0, best)


def hiding_bandwidth(size: float, backward: float, buckets: float, ranks: int, alpha: float) -> float:
    """The lowest bandwidth at which only the last bucket's all-reduce is exposed.

    Below it the backward pass is too short to hide the communication.

    Args:
        size, backward, ranks, alpha: as in `exposed_seconds`.
        buckets: n, how many.

    Returns: bytes per second, one way; infinity if the latencies alone take longer than
    the backward pass, 0 for a single rank.

    >>> round(hiding_bandwidth(3e9, 0.1, 30, 16, alpha=14e-6) / 1e9, 1)
    64.4
    """
    _check_step(size, backward, ranks, alpha)
    if buckets < 1:
        raise ValueError(f"buckets must be 1 or more, got {buckets}")
    steps, sent = ring_all_reduce_cost(size, ranks)
    left = backward - buckets * steps * alpha
    return sent / left if left > 0 else math.inf


def contended_seconds(
    computing: float, communicating: float, slower: float = 0.0, longer: float = 0.0
) -> float:
    """Predicted time of computing and communication that run together on one GPU.

    Args:
        computing: T, seconds of computing alone.
        communicating: C, seconds of communication alone.
        slower: x, the fraction of its speed that computing loses while communication is
            under way, from 0 to below 1.
        longer: y, by which fraction communication takes longer beside computing.

    >>> contended_seconds(10.0, 6.0), contended_seconds(10.0, 6.0, slower=0.25)
    (10.0, 11.5)
    """
    if not 0 <= slower < 1:
        raise ValueError(f"slower must be from 0 to below 1, got {slower}")
    if computing < 0 or communicating < 0 or longer < 0:
        raise ValueError(
            "computing, communicating and longer must be 0 or more, got "
            f"{computing}, {communicating} and {longer}"
        )
    stretched = communicating * (1 + longer)
    return max(stretched, computing + slower * stretched)


def overlap_trial(comm: Comm, x: Array, gradient: Array, repeats: int = 5) -> dict[str, list[float]]:
    """Time products alone, an all-reduce alone, and both at once; a rank program.

    Args:
        comm: the communicator.
        x: a square matrix, multiplied with itself four times.
        gradient: what is all-reduced.
        repeats: timed repetitions; one more warms up.

    Returns: seconds of each repetition under "computing", "communicating" and "both".
    """

    def settle() -> None:
        if getattr(getattr(x, "device", None), "type", "cpu") == "cuda":
            import torch

            torch.cuda.synchronize()

    def products() -> None:
        y = x
        for _ in range(4):
            y = x @ y
        comm.compute(flops=8 * x.shape[0] ** 3)

    def both() -> None:
        work = comm.all_reduce(gradient, async_op=True)
        products()
        work.wait()

    out: dict[str, list[float]] = {}
    for name, what in (
        ("computing", products),
        ("communicating", lambda: comm.all_reduce(gradient)),
        ("both", both),
    ):
        out[name] = []
        for _ in range(repeats + 1):
            comm.barrier()
            settle()
            began = comm.time()
            what()
            settle()
            out[name].append(comm.time() - began)
        out[name] = out[name][1:]
    return out
