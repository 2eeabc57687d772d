"""`simulate`: many virtual ranks in one process, with a virtual clock and every byte counted."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from manyranks.runtime import vectorised
from manyranks.runtime.comm import CLOSED_FORMS, Call, Comm, Work
from manyranks.runtime.engine import UNSET, Channel, Engine, Meeting, Message, Pending, Receive, Strand
from manyranks.runtime.errors import CollectiveMismatchError
from manyranks.runtime.hardware import Cluster, check_count, check_number
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
    if not callable(program):
        raise TypeError(f"program must be a function of a communicator, got {program!r}")
    if inputs is not None:
        if not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
            raise TypeError(f"inputs must be a sequence with one entry for each rank, got {type(inputs).__name__}")
        ranks = len(inputs) if ranks is None and cluster is None else ranks
    if cluster is not None and not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {cluster!r}")
    if ranks is None:
        if cluster is None:
            raise ValueError("how many ranks? Give ranks=, inputs= or cluster=")
        ranks = cluster.ranks
    ranks = check_count("ranks", ranks)
    if cluster is not None and ranks > cluster.ranks:
        raise ValueError(f"ranks must be at most the {cluster.ranks} of {cluster!r}, got {ranks}")
    if inputs is not None and len(inputs) != ranks:
        raise ValueError(f"inputs must have one entry for each of the {ranks} ranks, got {len(inputs)}")
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
        arguments = () if inputs is None else (_own(inputs[strand.rank]),)
        comm = SimComm(engine, strand, world, strand.rank, key=0)
        results[strand.rank] = program(comm, *arguments, **_own(shared))

    engine.mains = [Strand(engine, rank, 0, main) for rank in world]
    engine.starting = engine.mains[::-1]  # run from the end of the list: rank 0 first
    engine.run()
    ends = [s.clock for s in engine.mains]
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


def _own(value: Any) -> Any:
    """A copy of the arrays in `value` (through lists, tuples and dicts), everything else as it is."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(_own(v) for v in value)
    if type(value) is dict:
        return {k: _own(v) for k, v in value.items()}
    return copy.copy(value) if isinstance(value, (set, bytearray)) else value


class SimComm(Comm):
    """A communicator of virtual ranks."""

    xp = xp

    def __init__(self, engine: Engine, strand: Strand, ranks: tuple[int, ...], rank: int, key: Any, internal: bool = False):
        self.engine, self.strand, self.key = engine, strand, key
        self.ranks, self.rank, self.size = ranks, rank, len(ranks)
        self.label = "send"
        self.kind = internal  # collectives' messages and the program's own are never confused
        self.calls = 0
        self.groups: dict[tuple[int, ...], int] = {}
        self.to: dict[int, Channel] = {}
        self.of: dict[int, Channel] = {}
        self.beside: deque[tuple[Call, Any, Pending, float, int]] | None = None  # queue of the strand beside
        self._beside_strand: Strand | None = None
        self._internal: SimComm | None = None

    # ------------------------------------------------------------------ messages

    def isend(self, x: Any, dst: int) -> Work:
        if type(dst) is not int or not 0 <= dst < self.size or dst == self.rank:
            dst = self._peer(dst, "dst")
        return self._isend(x if type(x) is np.ndarray or type(x) is Phantom else self._array(x, "x"), dst)

    def irecv(self, src: int) -> Work:
        if type(src) is not int or not 0 <= src < self.size or src == self.rank:
            src = self._peer(src, "src")
        return self._irecv(src)

    def recv(self, src: int) -> Any:
        return self.irecv(src).wait()

    def _channel(self, src: int, dst: int) -> Channel:
        key = (self.key, self.kind, src, dst)
        found = self.engine.channels.get(key)
        if found is None:
            found = self.engine.channels[key] = Channel(self.engine, self.ranks[src], self.ranks[dst], self.label)
        return found

    def _isend(self, x: Any, dst: int) -> Message:
        channel = self.to.get(dst)
        if channel is None:
            channel = self.to[dst] = self._channel(self.rank, dst)
        engine, strand = self.engine, self.strand
        m = Message()
        m.strand, m.channel, m.src, m.dst = strand, channel, channel.src, channel.dst
        m.payload = x if x.__class__ is Phantom else x.copy()
        m.nbytes = x.nbytes
        m.round = strand.round + 1
        m.arrival = UNSET
        m.sender_waits = False
        m.posted = strand.seq = strand.seq + 1
        now = strand.clock
        if channel.receives:
            receive = channel.receives.popleft()
            receive.message = m
            m.receive = receive
            m.taken = receive.posted
        else:
            m.receive = None
            m.taken = UNSET
            channel.sends.append(m)
        if engine.beside[m.src]:
            m.start = m.sent = UNSET
            engine.fresh.append((now, m.src, strand.lane, m.posted, m))
        else:
            ports = engine.out_free[channel.tier]
            free = ports[m.src]
            m.start = now if now > free else free
            m.sent = ports[m.src] = m.start + m.nbytes * channel.gap
            engine.fresh.append((m.start + channel.alpha, m.src, strand.lane, m.posted, m))
        return m

    def _irecv(self, src: int) -> Receive:
        channel = self.of.get(src)
        if channel is None:
            channel = self.of[src] = self._channel(src, self.rank)
        strand = self.strand
        if channel.sends:
            m = channel.sends.popleft()
            receive = m.receive = Receive(strand, channel.src, m)
            m.taken = strand.clock
            if m.sender_waits and m.sent >= 0:
                m.sender_waits = False
                self.engine.ready.append(m.strand)
        else:
            receive = Receive(strand, channel.src, None)
            channel.receives.append(receive)
        return receive

    # ------------------------------------------------------------------ collectives

    def _run(self, call: Call, payload: Any, async_op: bool) -> Any:
        meeting_key, meeting = self._agree(call)
        if async_op or self.beside is not None:
            work = self._run_beside(call, payload, meeting_key, meeting)
            return work if async_op else work.wait()
        strand = self.strand
        began, strand.quiet, strand.call = strand.clock, True, call
        try:
            return self._do(self._inside(strand), call, payload, meeting_key, meeting)
        finally:
            strand.quiet, strand.call = False, None
            if strand.clock > began:
                self.engine.timeline.append((strand.rank, strand.lane, "wait", call.name, began, strand.clock))

    def _do(self, inside: SimComm, call: Call, payload: Any, key: tuple, meeting: Meeting) -> Any:
        """Run one collective on the strand of `inside`."""
        strand, engine = inside.strand, self.engine
        if self.size == 1:
            engine.meetings.pop(key, None)
            return inside._move(call, payload)
        if call.algorithm in CLOSED_FORMS:
            return self._closed_form(strand, call, payload, key, meeting)
        if len(meeting.came) == self.size:
            engine.meetings.pop(key, None)
        if (
            engine.vectorise
            and is_phantom(payload)
            and self.size >= vectorised.FROM_RANKS
            and call.name in vectorised.CALLS
            and call.algorithm in ("auto", "ring")
            and not engine.beside[strand.rank]
            and not meeting.slow
        ):
            meeting.entries[self.rank] = (strand, call, payload)
            strand.seq += 1
            engine.fresh.append((strand.clock, strand.rank, strand.lane, strand.seq, meeting))
            strand.block(meeting)
            if not meeting.slow:
                return vectorised.result(call, payload, self.rank, self.size, meeting.total)
        inside.label = call.name
        for channel in (*inside.to.values(), *inside.of.values()):
            channel.label = call.name
        return inside._move(call, payload)

    def _inside(self, strand: Strand) -> SimComm:
        """This communicator for a collective's own messages, on `strand`."""
        if self._internal is None or self._internal.strand is not strand:
            old = self._internal
            self._internal = SimComm(self.engine, strand, self.ranks, self.rank, self.key, internal=True)
            if old is not None:
                self._internal.to, self._internal.of = old.to, old.of
        return self._internal

    def _agree(self, call: Call) -> tuple[tuple, Meeting]:
        self.calls += 1
        key = (self.key, self.calls)
        meeting = self.engine.meetings.get(key)
        if meeting is None:
            meeting = self.engine.meetings[key] = Meeting(self.ranks)
        elif meeting.came:
            other, theirs = next(iter(meeting.came.items()))
            if theirs.agreement() != call.agreement():
                (a, call_a), (b, call_b) = sorted([(self.ranks[other], theirs), (self.ranks[self.rank], call)], key=lambda p: p[0])
                raise CollectiveMismatchError(
                    f"the ranks of a group must make the same collective call: rank {a} called {call_a}, "
                    f"rank {b} called {call_b}"
                )
        meeting.came[self.rank] = call
        return key, meeting

    def _closed_form(self, strand: Strand, call: Call, payload: Any, key: tuple, meeting: Meeting) -> Any:
        meeting.entries[self.rank] = (strand, call, payload)
        if len(meeting.entries) < self.size:
            strand.block(meeting)
        else:
            self.engine.meetings.pop(key, None)
            entries = [meeting.entries[i] for i in range(self.size)]
            meeting.total = vectorised.run_closed_form(self.engine, self.ranks, entries, self._combine(call.op))
            self.engine.ready.extend(s for s, _, _ in entries if s is not strand)
        total = meeting.total
        return self._finish(call.op, total if is_phantom(total) else total.copy())

    def _run_beside(self, call: Call, payload: Any, key: tuple, meeting: Meeting) -> Pending:
        """Queue a collective on the strand that runs this communicator's collectives beside the program."""
        owner, engine = self.strand, self.engine
        work = Pending(owner, call)
        payload = [p.copy() for p in payload] if isinstance(payload, list) else payload if payload is None else payload.copy()
        job = (call, payload, work, owner.clock, owner.round, key, meeting)
        if self.beside is not None:
            self.beside.append(job)
            return work
        self.beside = deque([job])
        engine.beside[owner.rank] += 1
        last = self._beside_strand
        if last is None:
            engine.lanes[owner.rank] += 1
            made = Strand(engine, owner.rank, engine.lanes[owner.rank], self._beside_body, owner.clock)
        else:
            made = Strand(engine, owner.rank, last.lane, self._beside_body, max(last.clock, owner.clock), last.seq)
        self._beside_strand = made
        engine.starting.append(made)
        return work

    def _beside_body(self, strand: Strand) -> None:
        engine = self.engine
        strand.quiet = True
        inside = self._inside(strand)
        while self.beside:
            call, payload, work, posted, round_, key, meeting = self.beside[0]
            strand.clock, strand.round = max(strand.clock, posted), max(strand.round, round_)
            began, strand.call = strand.clock, call
            work.result = self._do(inside, call, payload, key, meeting)
            engine.timeline.append((strand.rank, strand.lane, "comm", call.name, began, strand.clock))
            work.finished = (strand.clock, strand.round)
            if work.waits:
                work.waits = False
                engine.ready.append(work.owner)
            self.beside.popleft()
        self.beside = None
        engine.beside[strand.rank] -= 1
        engine.last_end = max(engine.last_end, strand.clock)

    # ------------------------------------------------------------------ the rest

    def compute(self, flops: float = 0, bytes: float = 0, seconds: float = 0, label: str = "compute") -> None:
        strand = self.strand
        took = self.engine.cluster.compute_seconds(flops=flops, bytes=bytes) + check_number("seconds", seconds)
        if took > 0:
            self.engine.timeline.append((strand.rank, strand.lane, "compute", label, strand.clock, strand.clock + took))
            strand.clock += took

    def time(self) -> float:
        return self.strand.clock

    def record(self, label: str, x: Any) -> None:
        if self.engine.record:
            self.engine.records.append(Record(self.strand.rank, self.strand.clock, label, _own(x)))

    def _make_group(self, world_ranks: tuple[int, ...]) -> SimComm:
        self.groups[world_ranks] = again = self.groups.get(world_ranks, 0) + 1
        rank = world_ranks.index(self.strand.rank)
        return SimComm(self.engine, self.strand, world_ranks, rank, (self.key, world_ranks, again))

    def _array(self, x: Any, name: str) -> Any:
        if is_phantom(x):
            return x
        if isinstance(x, np.ndarray):
            made = x
        elif isinstance(x, (bool, int, float, complex, np.generic)):
            made = np.asarray(x)
        else:
            raise TypeError(f"{name} must be a NumPy array, a phantom or a number, got {type(x).__name__}")
        if made.dtype == object:
            raise TypeError(f"{name} must be an array of numbers, got dtype object")
        return made

    def _copy(self, x: Any) -> Any:
        return x.copy()

    def _nodes(self) -> list[list[int]]:
        nodes: dict[int, list[int]] = {}
        for rank, world_rank in enumerate(self.ranks):
            nodes.setdefault(self.engine.cluster.node_of(world_rank), []).append(rank)
        return list(nodes.values())
