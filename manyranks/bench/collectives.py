"""Collectives and point-to-point messages, timed and checked, in nccl-tests' columns.

What the columns mean (nccl-tests' own definitions, of its PERFORMANCE.md):

- **size** is S in bytes: one rank's buffer in all_reduce, broadcast and reduce; the total of all ranks' parts in
  all_gather, reduce_scatter and all_to_all, which is the larger one of a rank's two buffers.
- **count** is the elements that a rank passes: S / n parts in all_gather, reduce_scatter and all_to_all.
- **time** is the mean over the ranks of the mean over the iterations.
- **algbw** is S / time. **busbw** is algbw times `FACTORS`: the share of S that has to cross a rank's link at least,
  so that it can be held against the link's rate. It is not the rate on a wire: an algorithm that moves more than that
  share (a tree, for small messages) loads the wire more than busbw says.
- **#wrong** counts wrong elements over all ranks, of one more call on fresh data after the timed ones.

torch.distributed's all_reduce, broadcast and reduce work in place only, and its all_to_all out of place only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from manyranks.bench.site import BenchError, Site

__all__ = ["COLLECTIVES", "FACTORS", "busbw_factor", "collective", "parse_size", "point_to_point", "sizes"]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")

#: busbw / algbw, of n ranks.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}

#: nccl-tests' names of torch's types.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int32": "int32",
}
OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "avg": "AVG"}
_EXACT = {"float16": 2**11, "bfloat16": 2**8}  # up to here the type holds every whole number

_IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all")
_REDUCES = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce")


def busbw_factor(name: str, ranks: int) -> float:
    """busbw / algbw of a collective among `ranks`.

    >>> busbw_factor("all_reduce", 8), busbw_factor("all_gather", 8), busbw_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    if name not in FACTORS:
        raise ValueError(f"name must be one of {', '.join(FACTORS)}, got {name!r}")
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    return FACTORS[name](ranks)


def parse_size(text: str) -> int:
    """Bytes from a number with K, M or G behind it, which are powers of 1,024, as in nccl-tests.

    >>> parse_size("8"), parse_size("4K"), parse_size("128M")
    (8, 4096, 134217728)
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in units else (text, "")
    try:
        size = float(digits) * units.get(unit, 1)
    except ValueError:
        raise ValueError(f"a size is a number with K, M or G behind it or nothing, got {text!r}") from None
    if not math.isfinite(size) or size < 1 or size != int(size):
        raise ValueError(f"a size is a whole number of bytes, 1 or more, got {text!r}")
    return int(size)


def sizes(begin: int, end: int, factor: float) -> Iterator[int]:
    """Sizes from `begin` to `end`, each `factor` times the one before.

    >>> list(sizes(8, 100, 2))
    [8, 16, 32, 64]
    """
    if begin > end:
        raise ValueError(f"the smallest size, {begin}, is larger than the largest, {end}")
    if factor <= 1 and begin != end:
        raise ValueError(f"the factor must be above 1, got {factor:g}")
    size = float(begin)
    while size <= end:
        yield int(size)
        if begin == end:
            return
        size *= factor


def counts(name: str, nbytes: int, element: int, ranks: int) -> tuple[int, int]:
    """(S in bytes, the count that nccl-tests prints) of a row; parts are rounded down to 16 bytes as there.

    >>> counts("all_reduce", 100, 4, 8)
    (100, 25)
    >>> counts("all_gather", 1000, 4, 8)
    (896, 28)
    """
    if name not in _IN_PARTS:
        return nbytes // element * element, nbytes // element
    step = max(1, 16 // element)
    part = nbytes // element // ranks // step * step
    return part * element * ranks, part


class Numbers:
    """The data: rank r's element i is (i + 3 r) mod `period`, and the results follow from it without a message."""

    def __init__(self, site: Site, dtype: str):
        import torch

        self.torch, self.ranks = torch, site.size
        self.device, self.dtype = site.device, getattr(torch, dtype)
        self.limit = _EXACT.get(dtype, 2**24)
        self.period = max(2, min(251, self.limit // max(1, site.size)))

    def of(self, rank: int, length: int, start: int = 0) -> Any:
        """Elements `start` to `start + length` of a rank; shape (length,)."""
        pattern = (self.torch.arange(self.period, device=self.device) + start + 3 * rank) % self.period
        return pattern.to(self.dtype).repeat(-(-length // self.period))[:length] if length else self.empty(0)

    def reduced(self, op: str, length: int, start: int = 0) -> Any:
        """What reducing all ranks' elements gives; shape (length,), float64."""
        torch = self.torch
        index = torch.arange(self.period, dtype=torch.int64) + start
        table = torch.stack([(index + 3 * r) % self.period for r in range(self.ranks)])
        row = {"sum": table.sum, "avg": table.sum, "min": table.amin, "max": table.amax}[op](0).double()
        if op == "avg":
            row = row / self.ranks
        return row.to(self.device).repeat(-(-length // self.period))[:length]

    def empty(self, length: int) -> Any:
        return self.torch.full((length,), -1, dtype=self.dtype, device=self.device)

    def wrong(self, got: Any, expected: Any, op: str = "sum") -> int:
        """How many elements differ. Sums of these whole numbers are exact; a mean may be rounded."""
        difference = (got.double() - expected.double()).abs()
        allowed = 0.0
        if op == "avg" and self.dtype.is_floating_point:
            allowed = 4 * self.torch.finfo(self.dtype).eps * self.period
        elif op == "avg":
            allowed = 1.0
        elif self.ranks * (self.period - 1) > self.limit:  # more ranks than a narrow type can sum exactly
            allowed = float(self.ranks * self.torch.finfo(self.dtype).eps * expected.double().abs().max())
        return int((~(difference <= allowed)).sum())


def _calls(name: str, numbers: Numbers, site: Site, count: int, op: str, root: int) -> dict[str, tuple]:
    """For "out" and "in" (place): (fill the buffers, run it once, count wrong elements), or nothing."""
    import torch.distributed as dist

    rank, n = site.rank, site.size
    reduce_op = getattr(dist.ReduceOp, OPS[op])
    # PyTorch 2.13 renames these two.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    total = count * n if name in _IN_PARTS else count
    place = slice(rank * count, (rank + 1) * count)
    big, other = numbers.empty(total), None

    def fill_mine() -> None:
        big.copy_(numbers.of(rank, total))

    if name == "all_reduce":
        work = lambda: dist.all_reduce(big, reduce_op)  # noqa: E731
        return {"in": (fill_mine, work, lambda: numbers.wrong(big, numbers.reduced(op, total), op))}
    if name == "reduce":
        work = lambda: dist.reduce(big, root, reduce_op)  # noqa: E731
        return {"in": (fill_mine, work,
                       lambda: numbers.wrong(big, numbers.reduced(op, total), op) if rank == root else 0)}  # fmt: skip
    if name == "broadcast":
        work = lambda: dist.broadcast(big, root)  # noqa: E731
        return {"in": (fill_mine, work, lambda: numbers.wrong(big, numbers.of(root, total)))}
    if name == "all_gather":
        other = numbers.empty(count)

        def gathered() -> int:
            return sum(
                numbers.wrong(big[r * count : (r + 1) * count], numbers.of(r, count)) for r in range(n)
            )

        def fill_parts(part: Any) -> Callable[[], None]:
            def fill() -> None:
                big.fill_(-1)
                part.copy_(numbers.of(rank, count))

            return fill

        return {
            "out": (fill_parts(other), lambda: all_gather(big, other), gathered),
            "in": (fill_parts(big[place]), lambda: all_gather(big, big[place]), gathered),
        }
    if name == "reduce_scatter":
        other = numbers.empty(count)

        def scattered(part: Any) -> Callable[[], int]:
            return lambda: numbers.wrong(part, numbers.reduced(op, count, start=rank * count), op)

        return {
            "out": (fill_mine, lambda: reduce_scatter(other, big, reduce_op), scattered(other)),
            "in": (fill_mine, lambda: reduce_scatter(big[place], big, reduce_op), scattered(big[place])),
        }
    other = numbers.empty(total)

    def exchanged() -> int:
        parts = [numbers.of(r, count, start=rank * count) for r in range(n)]
        return sum(numbers.wrong(other[r * count : (r + 1) * count], part) for r, part in enumerate(parts))

    return {"out": (fill_mine, lambda: dist.all_to_all_single(other, big), exchanged)}


def _number(value: float, width: int) -> str:
    """A number in `width` characters, one of them a blank before it, 2 decimals if they fit, as nccl-tests print it; 4 below 1."""
    for decimals in (4, 2, 1, 0) if abs(value) < 1 else (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) < width:
            return text.rjust(width)
    return f"{value:.1e}".rjust(width)


def _cell(found: dict[str, float] | None) -> str:
    if found is None:
        return f"{'N/A':>9}{'N/A':>8}{'N/A':>8}{'N/A':>7}"
    wrong = "N/A" if found["wrong"] is None else str(found["wrong"])
    return f"{_number(found['us'], 9)}{_number(found['algbw'], 8)}{_number(found['busbw'], 8)}{wrong:>7}"


def row_text(row: dict[str, Any]) -> str:
    """One line of the table."""
    head = f"{row['size']:>13}{row['count']:>14}{row['type']:>10}{row['redop']:>8}{row['root']:>8}"
    return head + _cell(row["out_of_place"]) + _cell(row["in_place"])


HEADER = (
    "#                                                         out-of-place                    in-place",
    "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
)


def collective(site: Site, options: dict[str, Any]) -> dict[str, Any]:
    """Time one collective over a range of sizes; prints the table, returns what it prints.

    Args:
        site: where it runs.
        options: name, begin, end, factor, iterations, warmup, dtype (nccl-tests' name), op, root, check.
    """
    name, dtype, op, root = options["name"], options["dtype"], options["op"], options["root"]
    if not 0 <= root < site.size:
        raise BenchError(f"--root must be a rank from 0 to {site.size - 1}, got {root}")
    numbers = Numbers(site, DTYPES[dtype])
    element = numbers.empty(1).element_size()
    factor = busbw_factor(name, site.size)
    site.header()
    site.say(f"# {name}: warm-up {options['warmup']}, iterations {options['iterations']}, "
             f"busbw = {factor:g} x algbw for {site.size} rank{'s' * (site.size != 1)}")  # fmt: skip
    if site.size == 1:
        site.say(
            "# one rank: nothing crosses a link; start more with torchrun --nproc-per-node or with --ranks"
        )
    for line in HEADER:
        site.say(line)
    rows, skipped, before = [], 0, None
    for nbytes in sizes(options["begin"], options["end"], options["factor"]):
        size, count = counts(name, nbytes, element, site.size)
        if count == 0:
            skipped = nbytes
        if count == 0 or size == before:
            continue
        before = size
        row: dict[str, Any] = {
            "size": size, "count": count, "type": dtype, "redop": op if name in _REDUCES else "none",
            "root": root if name in _ROOTED else -1, "out_of_place": None, "in_place": None,
        }  # fmt: skip
        for where, (fill, work, wrong) in _calls(name, numbers, site, count, op, root).items():
            fill()
            times = site.time(work, options["iterations"], options["warmup"])
            seconds = sum(times) / len(times)
            errors = None
            if options["check"]:
                fill()
                site.barrier()
                work()
                site.sync()
                errors = sum(site.gather(wrong()))
            algbw = size / seconds / 1e9
            row[f"{where}_{'of_' * (where == 'out')}place"] = {
                "us": seconds * 1e6, "algbw": algbw, "busbw": algbw * factor, "wrong": errors,
            }  # fmt: skip
        site.say(row_text(row))
        rows.append(row)
    if skipped:
        site.say(f"# up to {skipped} bytes left out: less than 16 bytes a rank")
    cells = [c for row in rows for c in (row["out_of_place"], row["in_place"]) if c]
    wrong_total = sum(c["wrong"] or 0 for c in cells)
    if options["check"]:
        site.say(f"# Out of bounds values : {wrong_total} {'OK' if wrong_total == 0 else 'FAILED'}")
    average = sum(c["busbw"] for c in cells) / len(cells) if cells else 0.0
    site.say(f"# Avg bus bandwidth    : {average:g}")
    return {
        "rows": rows, "factor": factor, "wrong": wrong_total if options["check"] else None,
        "average_busbw": average, "iterations": options["iterations"], "warmup": options["warmup"],
    }  # fmt: skip


def point_to_point(site: Site, options: dict[str, Any]) -> dict[str, Any]:
    """Latency and bandwidth between rank 0 and one other, one way and both ways at once.

    Latency is half a round trip. One way: a window of messages without waiting, then a short answer. Both ways: each
    sends and receives at the same time; its bandwidth is one way's share, so that full duplex shows as equal columns.
    """
    import torch
    import torch.distributed as dist

    from manyranks.runtime.costs import fit_alpha_beta

    if site.size < 2:
        raise BenchError("point_to_point needs two ranks or more: torchrun --nproc-per-node=2, or --ranks 2")
    peer = options["peer"] if options["peer"] is not None else site.size - 1
    if not 1 <= peer < site.size:
        raise BenchError(f"--peer must be a rank from 1 to {site.size - 1}, got {peer}")
    numbers, window = Numbers(site, DTYPES[options["dtype"]]), 8
    element = numbers.empty(1).element_size()
    me, other = site.rank, peer if site.rank == 0 else 0
    takes_part = me in (0, peer)
    site.header()
    site.say(
        f"# point_to_point: rank 0 and rank {peer}, warm-up {options['warmup']}, iterations {options['iterations']}"
    )
    site.say("#       size         count      type  latency  one way  both ways, each  #wrong")
    site.say("#        (B)    (elements)                (us)   (GB/s)          (GB/s)")
    rows = []
    answer = torch.zeros(1, device=site.device)
    for nbytes in sizes(options["begin"], options["end"], options["factor"]):
        count = nbytes // element
        if count == 0:
            continue
        size, mine, got = count * element, numbers.of(me, count), numbers.empty(count)

        def ping(mine=mine, got=got) -> None:
            if me == 0:
                dist.send(mine, other)
                dist.recv(got, other)
            elif takes_part:
                dist.recv(got, other)
                dist.send(mine, other)

        def stream(mine=mine, got=got) -> None:
            if me == 0:
                for work in [dist.isend(mine, other) for _ in range(window)]:
                    work.wait()
                dist.recv(answer, other)
            elif takes_part:
                for _ in range(window):
                    dist.recv(got, other)
                dist.send(answer, other)

        def both(mine=mine, got=got) -> None:
            if takes_part:
                calls = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, got, other)]
                for work in dist.batch_isend_irecv(calls):
                    work.wait()

        latency = max(site.time(ping, options["iterations"], options["warmup"])) / 2
        # A sender may be done before its last message has arrived: the slower one of the two counts.
        one_way = max(site.time(stream, max(1, options["iterations"] // window), 1)) / window
        each = max(site.time(both, options["iterations"], options["warmup"]))
        got.fill_(-1)
        both()
        site.sync()
        wrong = sum(site.gather(numbers.wrong(got, numbers.of(other, count)) if takes_part else 0))
        row = {
            "size": size, "count": count, "type": options["dtype"], "latency_us": latency * 1e6,
            "one_way": size / one_way / 1e9, "both_ways_each": size / each / 1e9, "wrong": wrong,
        }  # fmt: skip
        rows.append(row)
        site.say(f"{size:>13}{count:>14}{options['dtype']:>10}{_number(row['latency_us'], 9)}"
                 f"{_number(row['one_way'], 9)}{_number(row['both_ways_each'], 17)}{wrong:>8}")  # fmt: skip
    found: dict[str, Any] = {"rows": rows, "peer": peer, "wrong": sum(r["wrong"] for r in rows)}
    found |= {"iterations": options["iterations"], "warmup": options["warmup"]}
    try:
        alpha, beta = fit_alpha_beta([r["size"] for r in rows], [r["latency_us"] / 1e6 for r in rows])
    except ValueError as error:
        site.say(f"# no alpha and beta: {error}")
    else:
        found |= {"alpha": alpha, "beta": beta}
        site.say(
            f"# fitted to the latency column: alpha = {alpha * 1e6:.1f} us, beta = {beta / 1e9:.3g} GB/s"
        )
    return found
