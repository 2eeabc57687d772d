"""`simulate`: many virtual ranks in one process, with a virtual clock and every byte counted."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from manyranks.runtime import vectorised
from manyranks.runtime.arguments import check_inputs, check_program
from manyranks.runtime.comm import CLOSED_FORMS, Call, Comm
from manyranks.runtime.engine import LAST, UNSET, Channel, Engine, Meeting, Message, Pending, Receive, Strand
from manyranks.runtime.hardware import Cluster, check_number
from manyranks.runtime.phantom import Phantom, is_phantom
from manyranks.runtime.run import Record, Run, Timeline, Traffic

__all__ = ["simulate"]


def simulate(
    program: Callable[..., Any],
    ranks: int | None = None,
    inputs: Sequence[Any] | None = None,
    cluster: Cluster | None = None,
    record: bool = False,
    **shared: Any,
) -> Run:
    """Run `program` on virtual ranks and say what it returned, how long it took and what it sent.

    Each rank calls ``program(comm, inputs[rank], **shared)``, or ``program(comm, **shared)`` without `inputs`, and gets
    arrays of its own: copies, as separate processes would have.

    Args:
        program: the rank program. Arrays are NumPy's, or phantoms (`manyranks.runtime.phantom`).
        ranks: how many ranks; without it as many as `inputs`, or as the cluster has.
        inputs: one argument for each rank.
        cluster: what they run on; without it the flat ideal network ``Cluster.flat(ranks)``.
        record: keep what ``comm.record`` is given.
        **shared: further arguments, the same on all ranks.

    Returns: a `Run`; its ``seconds`` are virtual.

    Raises:
        RankError: a rank raised; the original exception is the ``__cause__``.
        DeadlockError: every rank left waits for another.
        CollectiveMismatchError: ranks of a group called different collectives, or one with different shapes.
        UnreceivedMessageError: a message was sent that nobody received.
        ValueError, TypeError: arguments that make no sense.

    >>> run = simulate(lambda comm, x: comm.all_reduce(x), inputs=[np.ones(4), np.ones(4) * 2])
    >>> run.results[0]
    array([3., 3., 3., 3.])
    >>> int(run.bytes_sent[0])
    32
    """
    check_program(program, inputs, shared)
    if cluster is not None and not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {cluster!r}")
    if ranks is None and inputs is not None and cluster is not None:
        ranks = cluster.ranks
    ranks = check_inputs(inputs, ranks)
    if ranks is None:
        if cluster is None:
            raise ValueError("how many ranks? Give ranks=, inputs= or cluster=")
        ranks = cluster.ranks
    if cluster is not None and ranks > cluster.ranks:
        raise ValueError(f"ranks must be at most the {cluster.ranks} of {cluster!r}, got {ranks}")
    return _simulate(program, ranks, inputs, cluster or Cluster.flat(ranks), record, shared)


def _simulate(
    program: Callable[..., Any],
    ranks: int,
    inputs: Sequence[Any] | None,
    cluster: Cluster,
    record: bool,
    shared: dict[str, Any],
    shuffle: int | None = None,
    vectorise: bool = True,
) -> Run:
    """`simulate` after its checks. `shuffle` seeds another order of running the ranks, for the test that it is no matter."""
    engine = Engine(cluster, ranks, record, shuffle, vectorise)
    results: list[Any] = [None] * ranks
    world = tuple(range(ranks))

    def main(strand: Strand) -> None:
        rank = strand.rank
        comm = SimComm(engine, strand, world, rank, 0)
        if shared:
            arguments = () if inputs is None else (_own(inputs[rank]),)
            results[rank] = program(comm, *arguments, **{name: _own(value) for name, value in shared.items()})
        elif inputs is None:  # written out: such a call puts less on the stack, which every switch has to save
            results[rank] = program(comm)
        else:
            results[rank] = program(comm, _own(inputs[rank]))

    mains = [Strand(engine, rank, 0) for rank in world]
    engine.mains = mains[:]
    engine.starting = [(strand, main) for strand in reversed(mains)]  # run from the end of the list: rank 0 first
    engine.run()
    ends = [s.clock for s in mains]
    engine.records.sort(key=lambda r: (r.time, r.rank))
    return Run(
        results=results,
        seconds=max(engine.last_end, *ends),
        traffic=Traffic(engine.log, ranks),
        timeline=Timeline(engine.timeline),
        cluster=cluster,
        world="simulated",
        ends=ends,
        records=engine.records,
        nominal=engine.nominal,
        notes=engine.notes,
    )


_AS_IT_IS = (Phantom, int, float, complex, str, bytes, bool, type(None))
_STATEFUL = (np.random.Generator, np.random.RandomState, random.Random)


def _own(value: Any) -> Any:
    """A copy of what ranks must not share: arrays, the containers and plain records that hold them, random generators.

    Everything else is passed as it is.
    """
    kind = value.__class__
    if kind in _AS_IT_IS:
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if kind is list or kind is tuple:
        return kind([_own(v) for v in value])
    if isinstance(value, dict):
        mine = copy.copy(value)  # keeps what a subclass adds, a defaultdict's factory for one
        for key, held in value.items():
            mine[key] = _own(held)
        return mine
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(_own, value))
    if isinstance(value, _STATEFUL):
        return copy.deepcopy(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not kind.__dataclass_params__.frozen:
        mine = copy.copy(value)
        for name, held in vars(value).items() if hasattr(value, "__dict__") else ():
            setattr(mine, name, _own(held))
        return mine
    return copy.copy(value) if isinstance(value, (set, bytearray, list)) else value


class SimComm(Comm):
    """A communicator of virtual ranks."""

    xp = xp

    # Most communicators never need these, and a run has many communicators.
    kind = False  # True for collectives' own messages: they and the program's are never confused
    label = "send"
    calls = 0
    outstanding = 0  # collectives beside the program that it has not waited for
    beside: Strand | None = None  # runs them
    queue: deque | None = None  # those not finished
    internal: SimComm | None = None  # this communicator for the messages of collectives
    groups: dict[tuple[int, ...], int] | None = None  # how often each was made

    def __init__(self, engine: Engine, strand: Strand, ranks: tuple[int, ...], rank: int, key: Any):
        self.engine, self.strand, self.key = engine, strand, key
        self.ranks, self.rank, self.size = ranks, rank, len(ranks)
        self.links: dict[int, Channel] = {}  # to rank r under r, from rank r under ~r

    # ------------------------------------------------------------------ messages

    def _link(self, src: int, dst: int) -> Channel:
        """The channel between two ranks of this group; shared with the other one's communicator."""
        key = (self.key, self.kind, src, dst)
        found = self.engine.channels.get(key)
        if found is None:
            found = self.engine.channels[key] = Channel(self.engine, self.ranks[src], self.ranks[dst], self.label)
        self.links[dst if src == self.rank else ~src] = found
        return found

    # The three below are what a run spends its time on: checked and done in one function each, for collectives too.

    def isend(self, x: Any, dst: int) -> Message:
        if type(dst) is not int or not 0 <= dst < self.size or dst == self.rank:
            dst = self._peer(dst, "dst")
        if x.__class__ is not Phantom and (x.__class__ is not np.ndarray or x.dtype.hasobject):
            x = self._array(x, "x")
        channel = self.links.get(dst) or self._link(self.rank, dst)
        strand = self.strand
        engine, now = strand.engine, strand.clock
        m = Message()
        m.strand, m.channel = strand, channel
        m.payload = x if x.__class__ is Phantom else x.copy()
        m.nbytes = nbytes = x.nbytes
        m.took = took = nbytes * channel.gap
        m.round = strand.round + 1
        m.arrival = UNSET
        m.sender_waits = False
        strand.key = key = strand.key + 1
        first = channel.first
        if first.__class__ is Receive:
            channel.first = channel.rest.popleft() if channel.rest else None
            first.message = m
            m.taken, m.waiter = first.posted, first.waiter
        else:
            m.taken, m.waiter = UNSET, None
            if first is None:
                channel.first = m
            else:
                channel.put(m)
        src = channel.src
        if engine.turns[src]:
            engine.turns[src] += 1
            m.start = m.sent = UNSET
            engine.fresh.append((now, LAST + key, m))
        else:
            ports = channel.out_free
            free = ports[src]
            m.start = start = now if now > free else free
            m.sent = ports[src] = start + took
            engine.fresh.append((start + channel.alpha, key, m))
        return m

    def recv(self, src: int) -> Any:
        if type(src) is not int or not 0 <= src < self.size or src == self.rank:
            src = self._peer(src, "src")
        channel = self.links.get(~src) or self._link(src, self.rank)
        strand = self.strand
        if channel.first.__class__ is Message:
            m = self._take(channel)
            if m.arrival < 0:
                m.waiter = strand
                strand.block(channel)
        else:
            receive = strand.receive
            if receive is None:  # one for all: a strand waits in one place at a time
                receive = strand.receive = Receive(strand, channel, None)
            receive.posted, receive.waiter = strand.clock, strand
            if channel.first is None:
                channel.first = receive
            else:
                channel.put(receive)
            strand.block(channel)
            m, receive.message = receive.message, None
        arrival = m.arrival
        if arrival > strand.clock:
            if not strand.quiet:
                strand.engine.timeline.append((strand.rank, strand.lane, "wait", "recv", strand.clock, arrival))
            strand.clock = arrival
        if m.round > strand.round:
            strand.round = m.round
        return m.payload

    def irecv(self, src: int) -> Receive:
        if type(src) is not int or not 0 <= src < self.size or src == self.rank:
            src = self._peer(src, "src")
        channel = self.links.get(~src) or self._link(src, self.rank)
        receive = Receive(self.strand, channel, self._take(channel))
        if receive.message is None:
            if channel.first is None:
                channel.first = receive
            else:
                channel.put(receive)
        return receive

    _isend, _recv, _irecv = isend, recv, irecv

    def _take(self, channel: Channel) -> Message | None:
        """The message that is next on `channel`, or None if there is none yet."""
        m = channel.first
        if m.__class__ is not Message:
            return None
        channel.first = channel.rest.popleft() if channel.rest else None
        m.taken = self.strand.clock
        if m.sender_waits and m.sent >= 0:
            m.sender_waits = False
            self.engine.ready.append(m.strand.resume)
        return m

    # ------------------------------------------------------------------ collectives

    def _run(self, call: Call, payload: Any, async_op: bool) -> Any:
        key, meeting = self._agree(call)
        if async_op or self.outstanding:  # the calls of a group take place one after the other
            work = self._run_beside(call, payload, key, meeting)
            return work if async_op else work.wait()
        strand = self.strand
        began, strand.quiet, strand.call = strand.clock, True, call
        try:
            return self._do(strand, call, payload, key, meeting)
        finally:
            strand.quiet, strand.call = False, None
            if strand.clock > began:
                self.engine.timeline.append((strand.rank, strand.lane, "wait", call.name, began, strand.clock))

    def _do(self, strand: Strand, call: Call, payload: Any, key: tuple, meeting: Meeting) -> Any:
        """Run one collective on `strand`."""
        engine = self.engine
        if call.algorithm in CLOSED_FORMS and self.size > 1:
            return self._closed_form(strand, call, payload, key, meeting)
        if len(meeting.came) == self.size:
            engine.meetings.pop(key, None)
        if (
            self.size >= vectorised.FROM_RANKS
            and engine.vectorise
            and payload.__class__ is Phantom
            and call.name in vectorised.CALLS
            and call.algorithm in ("auto", "ring")
            and not engine.turns[strand.rank]
            and meeting.state == "open"
        ):
            meeting.entries[self.rank] = (strand, call, payload)
            engine.forming[meeting] = min(strand.clock, engine.forming.get(meeting, strand.clock))
            strand.block(meeting)
            if meeting.state == "done":
                return vectorised.result(call, payload, self.rank, self.size, meeting.total)
        return self._inside(strand, call.name)._move(call, payload)

    def _inside(self, strand: Strand, label: str) -> SimComm:
        """This communicator for a collective's own messages, on `strand`."""
        inside = self.internal
        if inside is None:
            inside = self.internal = SimComm(self.engine, strand, self.ranks, self.rank, self.key)
            inside.kind = True
        inside.strand = strand
        if inside.label != label:
            inside.label = label
            for to, channel in inside.links.items():
                if to >= 0:
                    channel.label = label
        return inside

    def _agree(self, call: Call) -> tuple[tuple, Meeting]:
        self.calls += 1
        key = (self.key, self.calls)
        meetings = self.engine.meetings
        meeting = meetings.get(key)
        if meeting is None:
            meeting = meetings[key] = Meeting(self.ranks)
        else:
            theirs = next(iter(meeting.came.values()))
            if theirs is not call and theirs.agreement() != call.agreement():
                # Told by the engine when all have come to rest: a program can't swallow it, and whoever comes later is
                # looked at too.
                self.engine.mismatched.append(meeting)
                meeting.came[self.rank] = call
                self.strand.block(meeting)
        meeting.came[self.rank] = call
        return key, meeting

    def _closed_form(self, strand: Strand, call: Call, payload: Any, key: tuple, meeting: Meeting) -> Any:
        meeting.entries[self.rank] = (strand, call, payload)
        if len(meeting.entries) < self.size:
            strand.block(meeting)
        else:
            self.engine.meetings.pop(key, None)
            entries = [meeting.entries[i] for i in range(self.size)]
            try:
                meeting.total = vectorised.run_closed_form(self.engine, self.ranks, entries, self._combine(call.op))
            except Exception as error:  # nobody's in particular, so everybody raises it
                meeting.error = error
            self.engine.ready.extend(s.resume for s, _, _ in entries if s is not strand)
        if meeting.error is not None:
            raise copy.copy(meeting.error).with_traceback(None)
        total = meeting.total
        return self._finish(call.op, total if is_phantom(total) else total.copy())

    def _run_beside(self, call: Call, payload: Any, key: tuple, meeting: Meeting) -> Pending:
        """Queue a collective on the strand that runs this communicator's collectives beside the program."""
        owner, engine = self.strand, self.engine
        work = Pending(self, owner, call)
        self.outstanding += 1
        engine.turns[owner.rank] += 1
        if payload is not None:
            payload = [p.copy() for p in payload] if isinstance(payload, list) else payload.copy()
        if self.queue is None:
            self.queue = deque()
        self.queue.append((call, payload, work, owner.clock, owner.round, key, meeting))
        if len(self.queue) == 1:
            last = self.beside
            if last is None:
                engine.lanes[owner.rank] += 1
                made = Strand(engine, owner.rank, engine.lanes[owner.rank])
            else:
                made = Strand(engine, owner.rank, last.lane)
                made.clock, made.round, made.key = last.clock, last.round, last.key
            made.quiet = True
            self.beside = made
            engine.starting.append((made, self._run_queue))
        work.lane = self.beside
        return work

    def _run_queue(self, strand: Strand) -> None:
        """The body of the strand beside the program."""
        engine, queue = self.engine, self.queue
        while queue:
            call, payload, work, posted, round_, key, meeting = queue[0]
            strand.clock, strand.round = max(strand.clock, posted), max(strand.round, round_)
            began, strand.call = strand.clock, call
            work.result = self._do(strand, call, payload, key, meeting)
            engine.timeline.append((strand.rank, strand.lane, "comm", call.name, began, strand.clock))
            work.finished = (strand.clock, strand.round)
            if work.waits:
                work.waits = False
                engine.ready.append(work.owner.resume)
            queue.popleft()
        engine.last_end = max(engine.last_end, strand.clock)

    # ------------------------------------------------------------------ the rest

    def compute(self, flops: float = 0, bytes: float = 0, seconds: float = 0, label: str = "compute") -> None:
        strand = self.strand
        engine = strand.engine
        if type(seconds) is not float or not 0.0 <= seconds < math.inf:
            seconds = check_number("seconds", seconds)
        took = engine.cluster.compute_seconds(flops=flops, bytes=bytes) + seconds if flops or bytes else seconds
        if took > 0:
            began, strand.clock = strand.clock, strand.clock + took
            engine.timeline.append((strand.rank, strand.lane, "compute", label, began, strand.clock))

    def time(self) -> float:
        return self.strand.clock

    def record(self, label: str, x: Any) -> None:
        if self.engine.record:
            self.engine.records.append(Record(self.strand.rank, self.strand.clock, label, _own(x)))

    def _make_group(self, world_ranks: tuple[int, ...]) -> SimComm:
        if self.groups is None:
            self.groups = {}
        self.groups[world_ranks] = again = self.groups.get(world_ranks, 0) + 1
        rank = world_ranks.index(self.strand.rank)
        return SimComm(self.engine, self.strand, world_ranks, rank, (self.key, world_ranks, again))

    def _array(self, x: Any, name: str) -> Any:
        if isinstance(x, np.ndarray):
            made = x
        elif is_phantom(x):
            return x
        elif isinstance(x, (bool, int, float, complex, np.generic)):
            made = np.asarray(x)
        else:
            how = "; np.asarray(x) makes an array of it" if isinstance(x, (list, tuple)) or hasattr(x, "numpy") else ""
            raise TypeError(f"{name} must be a NumPy array, a phantom or a number, got {type(x).__name__}{how}")
        if made.dtype.hasobject:
            raise TypeError(f"{name} must be an array of numbers, got dtype object")
        return made

    def _copy(self, x: Any) -> Any:
        return x.copy()

    def _nodes(self) -> list[list[int]]:
        nodes: dict[int, list[int]] = {}
        for rank, world_rank in enumerate(self.ranks):
            nodes.setdefault(self.engine.cluster.node_of(world_rank), []).append(rank)
        return list(nodes.values())
