"""`TorchComm`: the communicator of a real process, over torch.distributed.

Messages go as `manyranks.runtime.wire` says. A collective with a named algorithm is moved message by message, as in
the simulator; with ``algorithm="auto"`` it is the backend's own, where the backend has it.

Whether the ranks of a group make the same collective calls is not asked beforehand: that would cost every call another
one. Each rank notes its calls; the launching process compares the notes when a rank is stuck or fails, and at the end.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch
import torch.distributed as dist

from manyranks.runtime import native
from manyranks.runtime.carry import from_torch, to_torch
from manyranks.runtime.comm import CLOSED_FORMS, Call, Comm, Work
from manyranks.runtime.flight import CallLog, FlightRecorder
from manyranks.runtime.hardware import check_number
from manyranks.runtime.schedules import chunk_bounds
from manyranks.runtime.wire import GlooWire, NcclWire, tag_of

__all__ = ["TorchComm", "World"]

_OURS = str(Path(__file__).parent)
_files: dict[Any, str | None] = {}  # code -> its file's name as a reader knows it; None for this package's


def place() -> str:
    """Where in the user's program this thread stands, e.g. "ring.py:12"."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code not in _files:
            _files[code] = None if code.co_filename.startswith(_OURS) else shown(code.co_filename)
        name = _files[code]
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def shown(filename: str) -> str:
    """A file's name as a reader knows it; notebook cells have files that nobody knows."""
    path = Path(filename)
    return "notebook cell" if path.parent.name.startswith("ipykernel_") else path.name


class Lane:
    """What runs one after the other on a rank: the program (number 0), or the collectives beside it."""

    __slots__ = ("number", "round", "quiet")

    def __init__(self, number: int, round: int = 0, quiet: bool = False):
        self.number, self.round, self.quiet = number, round, quiet


class World:
    """What a process has once: its place in the run, the wire, the clock and the notes it takes."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        backend: str,
        store: Any,
        local_size: int,
        recorder: FlightRecorder | None = None,
        record: bool = False,
    ):
        self.rank, self.size, self.device, self.backend = rank, size, device, backend
        self.store, self.local_size, self.recorder, self.record = store, local_size, recorder, record
        self.clock = time.perf_counter
        self.start = self.clock()
        self.wire: Any = GlooWire(self, dist.group.WORLD)
        if backend == "nccl" and size > 1:
            self.wire = NcclWire(self, dist.group.WORLD, dist.new_group(backend="nccl"))
        self.main = Lane(0)
        self.beside: list[TorchComm] = []  # communicators that have run collectives beside the program
        self.messages = 0
        self.lock = threading.Lock()
        self.outgoing: set[Any] = set()
        self.sent: list[tuple] = []  # (number, destination, bytes, start, round, call, tier)
        self.arrived: list[tuple] = []  # (source, number, end)
        self.nominal: list[tuple] = []
        self.waits: list[tuple] = []
        self.labels: list[tuple[float, str]] = []
        self.records: list[tuple] = []
        self.calls: dict[tuple[int, tuple[int, ...]], CallLog] = {}

    def next_number(self) -> int:
        with self.lock:
            self.messages += 1
            return self.messages

    def tier(self, other: int) -> int:
        """0 for a rank of the same node, 1 for another's."""
        return int(other // self.local_size != self.rank // self.local_size)

    def enter(self, lane: Lane, text: Any) -> float:
        """A communication call begins. Returns when."""
        if lane.number == 0 and not lane.quiet and self.recorder is not None:
            began = self.clock()
            self.recorder.enter(f"{text}\t{place()}", began)
            return began
        return self.clock()

    def leave(self, lane: Lane, label: str, began: float) -> None:
        """It has ended."""
        if not lane.quiet:
            self.waits.append((lane.number, label, began, self.clock()))
            if lane.number == 0 and self.recorder is not None:
                self.recorder.leave()

    def drain(self) -> None:
        """Wait for collectives that were started and not waited for."""
        for comm in self.beside:
            for work in list(comm._under_way):
                if not work.finished.is_set():
                    work.wait()

    def unanswered(self) -> list[int]:
        """The ranks from which something was asked for and has not come."""
        return self.wire.unanswered()

    def new_group(self, key: str) -> int:
        """A number for a group that its members, and only they, agree on: the first to come takes one."""
        mine = str(self.store.add("groups", 1))
        return int(self.store.compare_set(f"group {key}", "", mine))


class _Pending(Work):
    """A collective that runs beside the program."""

    def __init__(self, comm: TorchComm, call: Call, payload: Any, number: int):
        self.comm, self.call, self.payload, self.number = comm, call, payload, number
        self.round, self.issued = comm.lane.round, comm.world.clock()
        self.ready = self.comm.world.device.type == "cuda" and torch.cuda.current_stream().record_event()
        self.finished = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def wait(self) -> Any:
        world, lane = self.comm.world, self.comm.lane
        began = world.enter(lane, f"wait for {self.call}")
        if not self.finished.is_set():
            if world.wire.threads:
                self.finished.wait()
            else:
                self.comm._catch_up(self)
        world.leave(lane, self.call.name, began)
        if self.error is not None:
            raise self.error
        lane.round = max(lane.round, self.round)
        return self.result


class TorchComm(Comm):
    """A communicator of real processes; see `manyranks.runtime.comm.Comm` for what programs call."""

    xp = xp

    def __init__(
        self, world: World, ranks: tuple[int, ...], key: int, lane: Lane, tag: int, label: str = "send"
    ):
        self.world, self.ranks, self.key, self.lane, self.tag, self.label = (
            world,
            ranks,
            key,
            lane,
            tag,
            label,
        )
        self.rank, self.size = ranks.index(world.rank), len(ranks)
        self.inner = label != "send"  # of a collective's own messages
        self._count = 0
        self._groups: dict[tuple[int, ...], int] = {}
        self._group: Any = dist.group.WORLD if ranks == tuple(range(world.size)) else None
        self._queue: queue.SimpleQueue[_Pending] | None = None
        self._under_way: list[_Pending] = []
        self._beside: Lane | None = None

    @property
    def process_group(self) -> Any:
        """torch.distributed's own group of these ranks, for its modules (DDP, DTensor, ...); its ranks are sorted.

        All members ask for it (or make a backend's own collective) together: the first time sets up connections.
        """
        if self._group is None:
            self._group = _group_of_members(self.ranks, f"manyranks-{self.key}")
        return self._group

    @property
    def device(self) -> torch.device:
        """The rank's device."""
        return self.world.device

    # ------------------------------------------------------------------ messages

    def irecv(self, src: int) -> Work:
        return self.world.wire.post(self.lane, self.ranks[self._peer(src, "src")], self.tag, True)

    def _isend(self, x: Any, dst: int) -> Work:
        return self.world.wire.send(self.lane, x, self.ranks[dst], self.tag, self.label, not self.inner)

    def _irecv(self, src: int) -> Work:
        return self.world.wire.post(self.lane, self.ranks[src], self.tag, False)

    # ------------------------------------------------------------------ collectives

    def _run(self, call: Call, payload: Any, async_op: bool) -> Any:
        if call.algorithm in CLOSED_FORMS:
            raise ValueError(
                f"algorithm={call.algorithm!r} is a formula for the simulator; under launch take 'auto' (the backend's "
                "own) or one that is moved message by message"
            )
        self._count += 1
        self._note(call)
        world = self.world
        world.wire.flush()
        if async_op:
            work = _Pending(self, call, _snapshot(payload), self._count)
            self._start(work)
            return work
        if self._under_way and not all(w.finished.is_set() for w in self._under_way):
            work = _Pending(self, call, payload, self._count)
            self._start(work)
            return work.wait()
        lane = self.lane
        began = world.enter(lane, call)
        lane.quiet = True
        try:
            return self._do(call, payload, lane, self._count)
        finally:
            lane.quiet = False
            world.leave(lane, call.name, began)

    def _do(self, call: Call, payload: Any, lane: Lane, number: int) -> Any:
        """Run one collective, on the lane given."""
        world = self.world
        began = world.clock()
        moved = call.algorithm != "auto" or self.size == 1 or not native.has(call, payload, world)
        if not moved:
            try:
                result = native.run(self, call, payload)
                self._note_nominal(call, payload, result, began, lane)
            except native.Lacking:
                moved = True
        if moved:
            tag = tag_of(self.key, number)
            inner = TorchComm(world, self.ranks, self.key, lane, tag, call.name)
            result = inner._move(call, payload)
            world.wire.close(tag)
        if world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return result

    def _start(self, work: _Pending) -> None:
        """Run a collective beside the program, after those of this communicator that already do."""
        world = self.world
        self._under_way = [w for w in self._under_way if not w.finished.is_set()]
        self._under_way.append(work)
        if self._beside is None:
            world.beside.append(self)
            self._beside = Lane(len(world.beside), quiet=True)
        if not world.wire.threads:
            return
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._work_off, name="collectives", daemon=True).start()
        self._queue.put(work)

    def _work_off(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)
        while True:
            self._finish_pending(self._queue.get())

    def _catch_up(self, last: _Pending) -> None:
        """Where no threads may send, collectives run when they are waited for, in the order of their calls."""
        for work in list(self._under_way):
            if not work.finished.is_set():
                self._finish_pending(work)
            if work is last:
                return

    def _finish_pending(self, work: _Pending) -> None:
        lane, world = self._beside, self.world
        lane.round = max(lane.round, work.round)
        began = world.clock()
        try:
            if work.ready:
                with torch.cuda.stream(_side_stream()):
                    torch.cuda.current_stream().wait_event(work.ready)
                    work.result = self._do(work.call, work.payload, lane, work.number)
            else:
                work.result = self._do(work.call, work.payload, lane, work.number)
        except BaseException as error:  # told by `wait`
            work.error = error
        work.round, work.payload = lane.round, None
        world.waits.append((lane.number, work.call.name, began, world.clock()))
        work.finished.set()

    def _note(self, call: Call) -> None:
        world = self.world
        text = str(call)
        if world.recorder is not None and self.size > 1:
            world.recorder.collective(self.key, self._count, text, self.size)
        log = world.calls.get((self.key, self.ranks))
        if log is None:
            log = world.calls[self.key, self.ranks] = CallLog()
        log.add(text)

    def _note_nominal(self, call: Call, payload: Any, result: Any, began: float, lane: Lane) -> None:
        """Set down what a ring would have sent, where the backend can't be looked into."""
        n, r = self.size, self.rank
        right = self.ranks[(r + 1) % n]
        nbytes, count = _ring_bytes(call, payload, result, r, n)
        if count:
            world = self.world
            row = (
                world.rank,
                right,
                nbytes,
                began,
                world.clock(),
                lane.round + count,
                call.name,
                world.tier(right),
                count,
            )
            world.nominal.append(row)
            lane.round += count

    # ------------------------------------------------------------------ the rest

    def compute(self, flops: float = 0, bytes: float = 0, seconds: float = 0, label: str = "compute") -> None:
        for name, value in (("flops", flops), ("bytes", bytes), ("seconds", seconds)):
            check_number(name, value)
        self.world.labels.append((self.world.clock(), label))

    def time(self) -> float:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return self.world.clock() - self.world.start

    def record(self, label: str, x: Any) -> None:
        world = self.world
        if world.record:
            world.records.append((world.rank, self.time(), label, from_torch(x, copy=True)))

    def _make_group(self, world_ranks: tuple[int, ...]) -> TorchComm:
        self._groups[world_ranks] = again = self._groups.get(world_ranks, 0) + 1
        key = self.world.new_group(f"{self.key} {world_ranks} {again}")
        return TorchComm(self.world, world_ranks, key, self.lane, tag_of(key))

    def _array(self, x: Any, name: str) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x.detach().resolve_conj().resolve_neg()
        if isinstance(x, (np.ndarray, np.generic, bool, int, float, complex)):
            made = to_torch(np.asarray(x), self.world.device)
            if isinstance(made, torch.Tensor):
                return made
            raise TypeError(f"{name} must be an array of numbers, got dtype {made.dtype}")
        raise TypeError(f"{name} must be a tensor, a NumPy array or a number, got {type(x).__name__}")

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def _nodes(self) -> list[list[int]]:
        nodes: dict[int, list[int]] = {}
        for rank, world_rank in enumerate(self.ranks):
            nodes.setdefault(world_rank // self.world.local_size, []).append(rank)
        return list(nodes.values())


_naming = threading.Lock()


def _group_of_members(ranks: tuple[int, ...], name: str) -> Any:
    """A process group that only its members make.

    torch names such a group by its ranks and by how many groups the process has. Members may have different numbers of
    them, would wait under different names, and hang; so the name is given.
    """
    from torch.distributed import distributed_c10d as c10d

    with _naming:
        usual = getattr(c10d, "_hash_ranks_to_str", None)
        try:
            if usual is not None:
                c10d._hash_ranks_to_str = lambda ranks: name
            return dist.new_group(list(ranks), use_local_synchronization=True)
        finally:
            if usual is not None:
                c10d._hash_ranks_to_str = usual


_streams = threading.local()


def _side_stream() -> Any:
    if not hasattr(_streams, "stream"):
        _streams.stream = torch.cuda.Stream()
    return _streams.stream


def _snapshot(payload: Any) -> Any:
    if isinstance(payload, list):
        return [p.clone() for p in payload]
    return None if payload is None else payload.clone()


def _ring_bytes(call: Call, payload: Any, result: Any, r: int, n: int) -> tuple[int, int]:
    """(bytes, messages) that rank r of n sends in a ring; a chain for broadcast and reduce, and a barrier's tokens."""
    if call.name == "barrier":
        return 0, (n - 1).bit_length()
    if call.name in ("broadcast", "reduce"):
        last = (call.root - (call.name == "broadcast")) % n  # the chain's end sends nothing
        return (0, 0) if r == last else (int((result if call.name == "broadcast" else payload).nbytes), 1)
    if call.name == "all_gather":
        rows = native.last_rows()
        row = result.nbytes // max(1, sum(rows))
        return (sum(rows) - rows[(r + 1) % n]) * row, n - 1
    length = payload.numel() if call.name == "all_reduce" else len(payload)
    size = payload.nbytes // length if length else 0
    bounds = chunk_bounds(length, n)
    chunk = [(bounds[i + 1] - bounds[i]) * size for i in range(n)]
    total = length * size
    if call.name == "reduce_scatter":
        return total - chunk[r], n - 1
    return 2 * total - chunk[r] - chunk[(r + 1) % n], 2 * (n - 1)
