"""Messages between real processes: how an array travels from one rank to another over torch.distributed.

A receiver knows neither shape nor dtype, so each message begins with a header. On gloo a message of up to 4 KiB is
one packet, header and payload together; a longer one is two, the payload straight out of the array's memory. NCCL
carries only payloads on GPUs; headers go beside it through gloo.

A tag keeps apart what must not be confused: groups, the program's own messages, and each collective's.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from manyranks.runtime.comm import Work

__all__ = ["EAGER", "GlooWire", "NcclWire", "tag_of"]

EAGER = 4096  # bytes of payload that travel with the header
_HEADER = struct.Struct("<QQIIBB6x")  # payload bytes, tag, message number, round, dtype, dimensions; then the shape
_FIRST = _HEADER.size + 8 * 64 + EAGER  # the longest first packet: torch allows 64 dimensions
_NAMES = (
    "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
).split()
_DTYPES = [getattr(torch, name, None) for name in _NAMES]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
_GROUPS, _CALLS = 1 << 11, 1 << 18


def tag_of(group: int, call: int = 0) -> int:
    """The tag of collective number `call` (from 1) of a group; of the program's own messages without it.

    Even, at most 2^30; the odd one above is the payload's own. Wraps after 2,048 groups and 262,143 calls.
    """
    number = 1 + (call - 1) % (_CALLS - 1) if call else 0
    return (group % _GROUPS * _CALLS + number) * 2


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def _pack(x: torch.Tensor, tag: int, number: int, round_: int, body: torch.Tensor | None) -> torch.Tensor:
    """The first packet: header and, if given, payload bytes."""
    shape = tuple(x.shape)
    code = _CODES.get(x.dtype)
    if code is None:
        raise TypeError(f"an array of dtype {str(x.dtype).removeprefix('torch.')} can't be sent")
    head = _HEADER.size + 8 * (len(shape) + len(shape) % 2)  # a multiple of 16, so that the payload is aligned
    packet = np.empty(head + (body.numel() if body is not None else 0), dtype=np.uint8)
    _HEADER.pack_into(packet, 0, x.nbytes, tag, number, round_, code, len(shape))
    if shape:
        struct.pack_into(f"<{len(shape)}q", packet, _HEADER.size, *shape)
    if body is not None:
        packet[head:] = body.numpy()
    return torch.from_numpy(packet)


def _unpack(packet: torch.Tensor) -> tuple[int, int, int, int, torch.dtype, tuple[int, ...], int]:
    """Payload bytes, tag, number, round, dtype, shape, and where the payload begins."""
    raw = packet.numpy()
    nbytes, tag, number, round_, code, ndim = _HEADER.unpack_from(raw)
    shape = struct.unpack_from(f"<{ndim}q", raw, _HEADER.size)
    return nbytes, tag, number, round_, _DTYPES[code], shape, _HEADER.size + 8 * (ndim + ndim % 2)


class _Send(Work):
    """A message on its way; the sender's handle of it."""

    __slots__ = ("world", "lane", "dst", "parts", "kept")

    def __init__(self, world: Any, lane: Any, dst: int, parts: list, kept: Any):
        self.world, self.lane, self.dst, self.parts, self.kept = world, lane, dst, parts, kept

    def wait(self) -> None:
        if self.parts is None:
            return
        began = self.world.enter(self.lane, "send(dst={})", self.dst)
        for part in self.parts:
            part.wait()
        self.parts = self.kept = None
        self.world.outgoing.discard(self)
        self.world.leave(self.lane, "send", began)


class _Receive(Work):
    """A receive that was posted."""

    __slots__ = ("world", "lane", "inbox", "first", "packet", "value", "round", "done", "error")

    def __init__(self, world: Any, lane: Any, inbox: Any):
        self.world, self.lane, self.inbox = world, lane, inbox
        self.value = self.error = self.first = self.packet = None
        self.round = 0
        self.done = False

    def wait(self) -> torch.Tensor:
        began = self.world.enter(self.lane, "recv(src={})", self.inbox.src)
        if not self.done:
            self.inbox.complete(self)
        if self.error is not None:
            raise self.error
        self.lane.round = max(self.lane.round, self.round)
        self.world.leave(self.lane, "recv", began)
        return self.value


class _Inbox:
    """What comes from one rank with one tag, in order."""

    def __init__(self, wire: GlooWire, src: int, tag: int):
        self.wire, self.src, self.tag = wire, src, tag
        self.queue: deque[_Receive] = deque()
        self.lock = threading.Lock()
        self.posted: threading.Semaphore | None = None

    def post(self, lane: Any, background: bool) -> _Receive:
        receive = _Receive(self.wire.world, lane, self)
        receive.packet = torch.empty(_FIRST, dtype=torch.uint8)
        receive.first = self.wire.group.recv([receive.packet], self.src, self.tag)
        self.queue.append(receive)
        if background:
            if self.posted is None:
                self.posted = threading.Semaphore(0)
                threading.Thread(target=self._help, name=f"from rank {self.src}", daemon=True).start()
            self.posted.release()
        return receive

    def complete(self, receive: _Receive) -> None:
        """Take in what was posted up to `receive`."""
        with self.lock:
            while not receive.done:
                self._take(self.queue[0])
                self.queue.popleft()

    def _help(self) -> None:
        """Take in what the program asked for with `irecv` while it does something else."""
        while True:
            self.posted.acquire()
            with self.lock:
                if self.queue:
                    self._take(self.queue[0])
                    self.queue.popleft()

    def _take(self, receive: _Receive) -> None:
        world = self.wire.world
        try:
            receive.first.wait()
            nbytes, _, number, receive.round, dtype, shape, head = _unpack(receive.packet)
            if nbytes <= EAGER:
                body = receive.packet[head : head + nbytes]
            else:
                body = torch.empty(nbytes, dtype=torch.uint8)
                self.wire.group.recv([body], self.src, self.tag + 1).wait()
            value = body.view(dtype).reshape(shape)
            receive.value = value if world.device.type == "cpu" else value.to(world.device)
            world.arrived.append((self.src, number, world.clock()))
        except Exception as error:  # told by the rank that waits, not by a thread beside it
            receive.error = error
        receive.first = receive.packet = None
        receive.done = True


class GlooWire:
    """Messages through gloo, from and to host memory; arrays on a shared GPU are copied there and back."""

    threads = True  # messages of several lanes may be under way at once

    def __init__(self, world: Any, group: Any):
        self.world, self.group = world, group
        self.inboxes: dict[tuple[int, int], _Inbox] = {}

    def send(self, lane: Any, x: torch.Tensor, dst: int, tag: int, label: str, snapshot: bool) -> _Send:
        world = self.world
        number = world.next_number()
        began = world.clock()
        host = x.detach()
        if host.device.type != "cpu":
            host, snapshot = host.cpu(), False
        body = _bytes(host)
        if body.numel() <= EAGER:
            first = _pack(host, tag, number, lane.round + 1, body)
            work = _Send(world, lane, dst, [self.group.send([first], dst, tag)], None)
        else:
            if snapshot and body.data_ptr() == x.data_ptr():
                body = body.clone()
            first = _pack(host, tag, number, lane.round + 1, None)
            parts = [self.group.send([first], dst, tag), self.group.send([body], dst, tag + 1)]
            work = _Send(world, lane, dst, parts, body)
        world.outgoing.add(work)  # an unbound buffer that nobody holds would not be sent
        world.sent.append((number, dst, x.nbytes, began, lane.round + 1, label))
        return work

    def post(self, lane: Any, src: int, tag: int, background: bool) -> _Receive:
        """Post a receive. In the background, a thread takes in what comes while the program computes."""
        inbox = self.inboxes.get((src, tag))
        if inbox is None:
            inbox = self.inboxes[src, tag] = _Inbox(self, src, tag)
        return inbox.post(lane, background)

    def close(self, tag: int) -> None:
        """A collective has ended: forget its inboxes."""
        for key in [key for key in self.inboxes if key[1] == tag]:
            del self.inboxes[key]

    def flush(self) -> None:
        """Nothing waits here to be started."""


class _Flight:
    """Payloads that were started together, and end together."""

    __slots__ = ("works",)

    def __init__(self) -> None:
        self.works: list | None = None


class _Payload:
    """A payload that is started, with all others that are ready, when somebody first waits."""

    __slots__ = ("wire", "flight")

    def __init__(self, wire: NcclWire, flight: _Flight):
        self.wire, self.flight = wire, flight

    def wait(self) -> None:
        if self.flight.works is None:
            self.wire.flush()
        for work in self.flight.works:
            work.wait()
        self.wire.synchronize()


class _Stream:
    """All that comes from one rank, whatever its tag: NCCL has no tags, payloads keep the order of their headers."""

    def __init__(self, wire: NcclWire, src: int):
        self.wire, self.src = wire, src
        self.wanted: dict[int, deque[_Receive]] = {}
        self.spare: dict[int, deque[tuple[torch.Tensor, int]]] = {}

    def post(self, lane: Any, tag: int) -> _Receive:
        receive = _Receive(self.wire.world, lane, self)
        if self.spare.get(tag):
            receive.value, receive.round = self.spare[tag].popleft()
            receive.done = True
        else:
            self.wanted.setdefault(tag, deque()).append(receive)
        return receive

    def complete(self, receive: _Receive) -> None:
        world = self.wire.world
        while not receive.done:
            packet = torch.empty(_FIRST, dtype=torch.uint8)
            self.wire.group.recv([packet], self.src, 0).wait()
            nbytes, tag, number, round_, dtype, shape, _ = _unpack(packet)
            body = torch.empty(nbytes, dtype=torch.uint8, device=world.device)
            if nbytes:
                self.wire.start(dist.irecv, body, self.src).wait()
            world.arrived.append((self.src, number, world.clock()))
            value = body.view(dtype).reshape(shape)
            if self.wanted.get(tag):
                taker = self.wanted[tag].popleft()
                taker.value, taker.round, taker.done = value, round_, True
            else:
                self.spare.setdefault(tag, deque()).append((value, round_))


class NcclWire:
    """Payloads through NCCL, GPU to GPU; headers through gloo.

    NCCL blocks a GPU's queue until both ends have come, so what is to be sent and received is collected and started
    together (`batch_isend_irecv`) at the next wait: two ranks that both start a send and then receive don't block.
    What was started together ends together: a receive returns only when the sends before it have been taken, too.
    `payloads` is a group of its own, so that messages don't queue behind collectives.
    """

    threads = False

    def __init__(self, world: Any, group: Any, payloads: Any):
        self.world, self.group, self.payloads = world, group, payloads
        self.ready: list[Any] = []
        self.flight = _Flight()
        self.streams: dict[int, _Stream] = {}

    def send(self, lane: Any, x: torch.Tensor, dst: int, tag: int, label: str, snapshot: bool) -> _Send:
        world = self.world
        number = world.next_number()
        began = world.clock()
        x = x.detach()
        parts: list[Any] = [self.group.send([_pack(x, tag, number, lane.round + 1, None)], dst, 0)]
        body = None
        if x.numel():
            body = _bytes(x.to(world.device).clone())
            parts.append(self.start(dist.isend, body, dst))
        work = _Send(world, lane, dst, parts, body)
        world.outgoing.add(work)
        world.sent.append((number, dst, x.nbytes, began, lane.round + 1, label))
        return work

    def post(self, lane: Any, src: int, tag: int, background: bool) -> _Receive:
        stream = self.streams.get(src)
        if stream is None:
            stream = self.streams[src] = _Stream(self, src)
        return stream.post(lane, tag)

    def start(self, op: Any, body: torch.Tensor, peer: int) -> _Payload:
        self.ready.append(dist.P2POp(op, body, peer, group=self.payloads))
        return _Payload(self, self.flight)

    def flush(self) -> None:
        """Start all that is ready."""
        if self.ready:
            ops, self.ready = self.ready, []
            flight, self.flight = self.flight, _Flight()
            flight.works = dist.batch_isend_irecv(ops)

    def synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self, tag: int) -> None:
        """Nothing is kept for each collective."""
