"""The backend's own collectives, behind `Comm`'s conventions: any group order, uneven chunks, results as new arrays.

What a backend lacks (an integer type, gloo's reduce-scatter of older versions) is moved message by message instead, and
so are gather, scatter and all_to_all, whose shapes are free and which NCCL itself makes of single messages.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from manyranks.runtime.comm import Call
from manyranks.runtime.schedules import chunk_bounds
from manyranks.runtime.wire import array_in, pack, unpack

__all__ = ["Lacking", "has", "run"]

_OPS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}
_REDUCED = ("all_reduce", "reduce", "reduce_scatter")
_GLOO = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
_NCCL = {*_GLOO, torch.bfloat16}
_PACKET = 1024  # bytes: a broadcast's header, and its payload if that fits
_local = threading.local()
_lacking: set[str] = set()


class Lacking(Exception):
    """The backend turned out not to have this collective."""


def has(call: Call, payload: Any, world: Any) -> bool:
    """Whether the backend does this call itself."""
    if call.name == "barrier":
        return True
    if call.name not in ("broadcast", "all_gather", *_REDUCED) or call.name in _lacking:
        return False
    if call.name in _REDUCED:
        return payload.dtype in (_NCCL if world.backend == "nccl" else _GLOO) and payload.numel() > 0
    return True


def last_rows() -> list[int]:
    """How many rows each rank gave to this thread's last all_gather."""
    return _local.rows


def run(comm: Any, call: Call, x: Any) -> Any:
    """Run `call` on the backend."""
    world, group = comm.world, comm.process_group
    on = world.device if world.backend == "nccl" else torch.device("cpu")
    result = _CALLS[call.name](comm, call, x, group, on)
    return result if result is None else result.to(world.device)


def _barrier(comm: Any, call: Call, x: None, group: Any, on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1), group=group)  # on gloo, which the host waits for
    else:
        dist.barrier(group)


def _own(x: torch.Tensor, on: torch.device) -> torch.Tensor:
    """A contiguous copy that the backend may write to."""
    return x.to(on, memory_format=torch.contiguous_format, copy=True)


def _all_reduce(comm: Any, call: Call, x: torch.Tensor, group: Any, on: torch.device) -> torch.Tensor:
    buf = _own(x, on)
    dist.all_reduce(buf, getattr(dist.ReduceOp, _OPS[call.op]), group=group)
    return comm._finish(call.op, buf)


def _reduce(comm: Any, call: Call, x: torch.Tensor, group: Any, on: torch.device) -> torch.Tensor | None:
    buf = _own(x, on)
    dist.reduce(buf, comm.ranks[call.root], getattr(dist.ReduceOp, _OPS[call.op]), group=group)
    return comm._finish(call.op, buf) if comm.rank == call.root else None


def _broadcast(comm: Any, call: Call, x: torch.Tensor | None, group: Any, on: torch.device) -> torch.Tensor:
    """First a packet of fixed size with shape and dtype, and the payload if it is short; then the payload."""
    root, giver = comm.ranks[call.root], comm.rank == call.root
    buffer = bytearray(_PACKET)
    packet = torch.frombuffer(buffer, dtype=torch.uint8)
    if giver:
        first = pack(x.cpu() if x.nbytes < _PACKET else x, 0, 0, 0, x.nbytes < _PACKET)
        first = first if first.numel() <= _PACKET else pack(x, 0, 0, 0, False)
        packet[: first.numel()] = first
    dist.broadcast(packet, root, group=group)
    nbytes, _, _, _, dtype, shape, head = unpack(buffer)
    if head + nbytes <= _PACKET:
        return array_in(buffer, nbytes, head, dtype, shape)
    buf = _own(x, on) if giver else torch.empty(shape, dtype=dtype, device=on)
    dist.broadcast(buf.view(-1).view(torch.uint8), root, group=group)
    return buf


def _all_gather(comm: Any, call: Call, x: torch.Tensor, group: Any, on: torch.device) -> torch.Tensor:
    """Row counts first, since they may differ; then the rows, padded to the longest."""
    n = comm.size
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(counts, torch.tensor([len(x)]), group=group)
    at = sorted(comm.ranks)  # torch numbers a group's ranks in ascending order
    rows = _local.rows = [int(counts[at.index(r)]) for r in comm.ranks]
    longest = max(rows)
    tail = tuple(x.shape[1:])
    if longest == 0 or not _row_bytes(x):
        return x.new_zeros((sum(rows), *tail))
    body = torch.zeros((longest, _row_bytes(x)), dtype=torch.uint8, device=on)
    if len(x):
        body[: len(x)] = _own(x, on).view(-1).view(torch.uint8).reshape(len(x), -1)
    parts = [torch.empty_like(body) for _ in range(n)]
    dist.all_gather(parts, body, group=group)
    whole = torch.cat([parts[at.index(r)][: rows[i]] for i, r in enumerate(comm.ranks)])
    return whole.reshape(-1).view(x.dtype).reshape((sum(rows), *tail))


def _row_bytes(x: torch.Tensor) -> int:
    size = x.element_size()
    for k in x.shape[1:]:
        size *= k
    return size


def _reduce_scatter(comm: Any, call: Call, x: torch.Tensor, group: Any, on: torch.device) -> torch.Tensor:
    """Chunks padded to the longest one, in the order in which torch numbers the ranks."""
    n = comm.size
    bounds = chunk_bounds(len(x), n)
    longest = bounds[1]
    padded = torch.zeros((n, longest, *x.shape[1:]), dtype=x.dtype, device=on)
    for slot, world_rank in enumerate(sorted(comm.ranks)):
        r = comm.ranks.index(world_rank)
        padded[slot, : bounds[r + 1] - bounds[r]] = x[bounds[r] : bounds[r + 1]]
    out = torch.empty((longest, *x.shape[1:]), dtype=x.dtype, device=on)
    # reduce_scatter_tensor warns since PyTorch 2.13 that it has a new name
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    try:
        scatter(
            out, padded.flatten(0, 1), getattr(dist.ReduceOp, _OPS[call.op]), group=group
        )
    except RuntimeError as error:
        if "support" not in str(error):
            raise
        _lacking.add("reduce_scatter")  # gloo of older versions: the same on all ranks
        raise Lacking from error
    return comm._finish(call.op, out[: bounds[comm.rank + 1] - bounds[comm.rank]].clone())


_CALLS = {
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}
