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

import torch
import torch.distributed as dist

from manyranks.runtime.comm import Work

__all__ = ["EAGER", "GlooWire", "NcclWire", "array_in", "pack", "tag_of", "unpack"]

EAGER = 4096  # bytes of payload that travel with the header
# Payload bytes, tag, message number, round, dtype, number of dimensions; the shape follows.
_HEADER = struct.Struct("<QQIIBB6x")
_FIRST = _HEADER.size + 8 * 64 + EAGER  # the longest first packet: torch allows 64 dimensions
_NAMES = (
    "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
).split()
_DTYPES = [getattr(torch, name, None) for name in _NAMES]
_NUMPY = {d for d in _DTYPES if d is not None and "bfloat" not in str(d) and "float8" not in str(d)}
_LENGTH = struct.Struct("<q")
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
_GROUPS, _CALLS = 1 << 11, 1 << 18


def tag_of(group: int, call: int = 0) -> int:
    """The tag of collective number `call` (from 1) of a group; of the program's own messages without it.

    Even, at most 2^30; the odd one above is the payload's own. Wraps after 2,048 groups and 262,143 calls.
    """
    number = 1 + (call - 1) % (_CALLS - 1) if call else 0
    return (group % _GROUPS * _CALLS + number) * 2


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of an array, without a copy if it is contiguous. (One element may have any stride and counts as such.)"""
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def pack(x: torch.Tensor, tag: int, number: int, round_: int, payload: bool) -> torch.Tensor:
    """The first packet: a header and, if asked for, the bytes of `x`. Written for speed: its time is part of α."""
    shape = x.shape
    ndim = len(shape)
    code = _CODES.get(x.dtype)
    if code is None:
        raise TypeError(f"an array of dtype {str(x.dtype).removeprefix('torch.')} can't be sent")
    # A multiple of 16, so that the payload is aligned.
    head = _HEADER.size + 8 * (ndim + (ndim & 1))
    nbytes = x.nbytes
    packet = bytearray(head + nbytes if payload else head)
    _HEADER.pack_into(packet, 0, nbytes, tag, number, round_, code, ndim)
    if ndim == 1:
        _LENGTH.pack_into(packet, _HEADER.size, shape[0])
    elif ndim:
        struct.pack_into(f"<{ndim}q", packet, _HEADER.size, *shape)
    if payload and nbytes:
        packet[head:] = (x if x.dtype in _NUMPY else _bytes(x)).numpy().tobytes()
    return torch.frombuffer(packet, dtype=torch.uint8)


def unpack(packet: bytearray) -> tuple[int, int, int, int, torch.dtype, tuple[int, ...], int]:
    """Payload bytes, tag, number, round, dtype, shape, and where the payload begins."""
    nbytes, tag, number, round_, code, ndim = _HEADER.unpack_from(packet)
    shape = struct.unpack_from(f"<{ndim}q", packet, _HEADER.size)
    return nbytes, tag, number, round_, _DTYPES[code], shape, _HEADER.size + 8 * (ndim + (ndim & 1))


def array_in(
    packet: bytearray, nbytes: int, head: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """The array whose bytes begin at `head`. It keeps the packet's memory."""
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(packet, dtype=dtype, count=nbytes // dtype.itemsize, offset=head)
    return flat if len(shape) == 1 else flat.reshape(shape)


class _Send(Work):
    """A message on its way; the sender's handle of it."""

    __slots__ = ("world", "lane", "dst", "parts", "kept")

    def __init__(self, world: Any, lane: Any, dst: int, parts: list, kept: Any):
        self.world, self.lane, self.dst, self.parts, self.kept = world, lane, dst, parts, kept

    def wait(self) -> None:
        if self.parts is None:
            return
        began = self.world.enter(self.lane, f"send(dst={self.dst})")
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
        began = self.world.enter(self.lane, f"recv(src={self.inbox.src})")
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
        receive.packet = bytearray(_FIRST)
        into = torch.frombuffer(receive.packet, dtype=torch.uint8)
        receive.first = self.wire.group.recv([into], self.src, self.tag)
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
            nbytes, _, number, receive.round, dtype, shape, head = unpack(receive.packet)
            if nbytes <= EAGER:
                value = array_in(receive.packet, nbytes, head, dtype, shape)
            else:
                value = torch.empty(shape, dtype=dtype)
                self.wire.group.recv([value.view(-1)], self.src, self.tag + 1).wait()
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
        nbytes = x.nbytes
        host = x
        if x.device.type != "cpu":
            host, snapshot = x.cpu(), False
        if nbytes <= EAGER:
            first = pack(host, tag, number, lane.round + 1, True)
            work = _Send(world, lane, dst, [self.group.send([first], dst, tag)], None)
        else:
            body = _bytes(host)
            if snapshot and body.data_ptr() == host.data_ptr():
                body = body.clone()
            first = pack(host, tag, number, lane.round + 1, False)
            parts = [self.group.send([first], dst, tag), self.group.send([body], dst, tag + 1)]
            work = _Send(world, lane, dst, parts, body)
        world.outgoing.add(work)  # an unbound buffer that nobody holds would not be sent
        world.sent.append((number, dst, nbytes, began, lane.round + 1, label, world.tier(dst)))
        return work

    def post(self, lane: Any, src: int, tag: int, background: bool) -> _Receive:
        """Post a receive. In the background, a thread takes in what comes while the program computes."""
        inbox = self.inboxes.get((src, tag))
        if inbox is None:
            inbox = self.inboxes[src, tag] = _Inbox(self, src, tag)
        return inbox.post(lane, background)

    def close(self, tag: int) -> None:
        """A collective has ended: forget its inboxes."""
        for key in [key for key in list(self.inboxes) if key[1] == tag]:
            del self.inboxes[key]

    def flush(self) -> None:
        """Nothing waits here to be started."""

    def unanswered(self) -> list[int]:
        """The ranks whose message was asked for and has not come."""
        return [src for (src, _), inbox in self.inboxes.items() if inbox.queue]


class _Payload:
    """A payload that is started, with others that are ready, when somebody first waits."""

    __slots__ = ("wire", "op", "peer", "works")

    def __init__(self, wire: NcclWire, op: Any, peer: tuple[bool, int]):
        self.wire, self.op, self.peer = wire, op, peer
        self.works: list | None = None

    def wait(self) -> None:
        while self.works is None:
            self.wire.flush()
        while self.works:  # shared with what was started together: each is waited for once
            self.works.pop().wait()
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
            packet = bytearray(_FIRST)
            self.wire.group.recv([torch.frombuffer(packet, dtype=torch.uint8)], self.src, 0).wait()
            nbytes, tag, number, round_, dtype, shape, _ = unpack(packet)
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
    together (`batch_isend_irecv`) at the next wait, one payload for each peer and direction: two ranks that both start
    a send and then receive don't block. What was started together ends together: a receive returns only when the sends
    started with it have been taken, too. A program that runs on gloo may therefore hang here if a rank leaves a message
    to it untaken for long; NCCL programs are written to take messages in the order of their sending.
    `payloads` is a group of its own, so that messages don't queue behind collectives.
    """

    threads = False

    def __init__(self, world: Any, group: Any, payloads: Any):
        self.world, self.group, self.payloads = world, group, payloads
        self.ready: list[_Payload] = []
        self.streams: dict[int, _Stream] = {}

    def send(self, lane: Any, x: torch.Tensor, dst: int, tag: int, label: str, snapshot: bool) -> _Send:
        world = self.world
        number = world.next_number()
        began = world.clock()
        parts: list[Any] = [self.group.send([pack(x, tag, number, lane.round + 1, False)], dst, 0)]
        body = None
        if x.numel():
            body = _bytes(x.to(world.device).clone())
            parts.append(self.start(dist.isend, body, dst))
        work = _Send(world, lane, dst, parts, body)
        world.outgoing.add(work)
        world.sent.append((number, dst, x.nbytes, began, lane.round + 1, label, world.tier(dst)))
        return work

    def post(self, lane: Any, src: int, tag: int, background: bool) -> _Receive:
        stream = self.streams.get(src)
        if stream is None:
            stream = self.streams[src] = _Stream(self, src)
        return stream.post(lane, tag)

    def start(self, op: Any, body: torch.Tensor, peer: int) -> _Payload:
        made = _Payload(self, dist.P2POp(op, body, peer, group=self.payloads), (op is dist.isend, peer))
        self.ready.append(made)
        return made

    def flush(self) -> None:
        """Start the first payload that is ready for each peer and direction."""
        first = list({p.peer: p for p in reversed(self.ready)}.values())
        if first:
            self.ready = [p for p in self.ready if p not in first]
            works = dist.batch_isend_irecv([p.op for p in first])
            for payload in first:
                payload.works = works

    def synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self, tag: int) -> None:
        """Nothing is kept for each collective."""

    def unanswered(self) -> list[int]:
        """The ranks whose message was asked for and has not come."""
        return [src for src, stream in self.streams.items() if any(stream.wanted.values())]
