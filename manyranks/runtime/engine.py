"""The event loop behind `simulate`: strands that wait, messages under way, ports with queues, and the virtual clock.

How time is kept
    A message of b bytes posted at time t on a tier of latency α and bandwidth β takes its turn on the sender's out
    port (``start``), occupies it for b/β, reaches the receiver's in port α later, takes its turn there, occupies that
    for b/β too, and has arrived. Ports are full duplex, one in and one out for each rank and tier, first come first
    served. Two messages to one rank so take twice as long: a hotspot shows in the clock.

How order is kept
    Ranks are greenlets. Each runs, ahead of the others if it can, until it has to wait. When nobody can run, messages
    are settled on their in ports in the order in which they reach them in virtual time. Whatever a rank does after it
    is woken by a message settled at time h reaches no in port before h + α, so all messages up to h + α can be settled
    in one go (the lookahead). Out ports belong to one rank and need no such care, until a collective runs beside the
    program (``async_op``): then messages queue for the out port in virtual time too. So the outcome does not depend on
    the order in which Python ran the ranks.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from manyranks.runtime import vectorised
from manyranks.runtime.comm import Call, Work
from manyranks.runtime.errors import CollectiveMismatchError, DeadlockError, RankError, UnreceivedMessageError
from manyranks.runtime.hardware import Cluster
from manyranks.runtime.run import Record

__all__ = ["Channel", "Engine", "Meeting", "Message", "Pending", "Receive", "Strand", "UNSET"]

UNSET = -1.0  # a time that is not known yet


class Strand:
    """Something with a clock that can wait: a rank's program (lane 0), or a collective running beside it."""

    __slots__ = ("engine", "rank", "lane", "clock", "round", "seq", "glet", "waits", "call", "quiet", "done")

    def __init__(self, engine: Engine, rank: int, lane: int, body: Callable[[Strand], None], clock: float = 0.0, seq: int = 0):
        self.engine, self.rank, self.lane, self.clock = engine, rank, lane, clock
        self.round = 0  # the longest chain of messages behind it
        self.seq = seq  # numbers its messages: the tie-breaker between simultaneous ones
        self.waits: Any = None
        self.call: Call | None = None  # the collective it is in
        self.quiet = False  # inside a collective: one interval is drawn for the whole call
        self.done = False
        self.glet = greenlet(lambda: engine.guard(self, body), parent=engine.hub)
        engine.alive.add(self)

    def block(self, why: Any) -> None:
        """Let others run until somebody puts this strand on the ready list again."""
        engine = self.engine
        if engine.over:
            raise GreenletExit
        self.waits = why
        if engine.ready:
            engine.ready.pop().glet.switch()
        else:
            engine.hub.switch()
        self.waits = None

    def advance(self, to: float, label: str) -> None:
        """Waited until `to`."""
        if to > self.clock:
            if not self.quiet:
                self.engine.timeline.append((self.rank, self.lane, "wait", label, self.clock, to))
            self.clock = to


class Message(Work):
    """A message, and the sender's handle of it."""

    __slots__ = (
        "strand", "src", "dst", "nbytes", "payload", "round", "channel", "posted", "start", "sent", "arrival", "taken",
        "receive", "sender_waits",
    )  # fmt: skip

    def wait(self) -> None:
        if self.taken < 0 or self.sent < 0:
            self.sender_waits = True
            self.strand.block(self)
        self.strand.advance(self.sent if self.sent > self.taken else self.taken, "send")

    def why(self) -> tuple[str, int]:
        return f"rank {self.dst} to receive its message", self.dst


class Receive(Work):
    """A receive that was posted."""

    __slots__ = ("strand", "src", "message", "posted", "waits")

    def __init__(self, strand: Strand, src: int, message: Message | None):
        self.strand, self.src, self.message = strand, src, message
        self.posted = strand.clock
        self.waits = False

    def wait(self) -> Any:
        m, strand = self.message, self.strand
        if m is None or m.arrival < 0:
            self.waits = True
            strand.block(self)
            m = self.message
        if m.arrival > strand.clock:
            if not strand.quiet:
                strand.engine.timeline.append((strand.rank, strand.lane, "wait", "recv", strand.clock, m.arrival))
            strand.clock = m.arrival
        if m.round > strand.round:
            strand.round = m.round
        return m.payload

    def why(self) -> tuple[str, int]:
        return f"a message from rank {self.src}", self.src


class Channel:
    """The messages of one kind from one rank to another, first in, first out."""

    __slots__ = ("sends", "receives", "tier", "alpha", "gap", "label", "src", "dst")

    def __init__(self, engine: Engine, src: int, dst: int, label: str):
        self.sends: deque[Message] = deque()
        self.receives: deque[Receive] = deque()
        self.tier = engine.cluster.tier(src, dst)
        self.alpha, self.gap = engine.alpha[self.tier], engine.gap[self.tier]
        self.label, self.src, self.dst = label, src, dst


class Pending(Work):
    """Handle of a collective that runs beside the program."""

    __slots__ = ("owner", "call", "result", "finished", "waits")

    def __init__(self, owner: Strand, call: Call):
        self.owner, self.call = owner, call
        self.result: Any = None
        self.finished: tuple[float, int] | None = None  # when, and after how many rounds
        self.waits = False

    def wait(self) -> Any:
        if self.finished is None:
            self.waits = True
            self.owner.block(self)
        at, round_ = self.finished
        self.owner.advance(at, self.call.name)
        self.owner.round = max(self.owner.round, round_)
        return self.result

    def why(self) -> tuple[str, int]:
        return f"its own {self.call.name} started with async_op=True", self.owner.rank


class Meeting:
    """One collective call of a group: who has come, and with what."""

    __slots__ = ("members", "entries", "came", "slow", "total")

    def __init__(self, members: tuple[int, ...]):
        self.members = members
        self.entries: dict[int, tuple[Strand, Call, Any]] = {}  # those that wait here, by rank in the group
        self.came: dict[int, Call] = {}  # everybody so far
        self.slow = False  # decided to go message by message
        self.total: Any = None  # of what was brought: reduced by a closed form, bytes in a vectorised ring

    def why(self) -> tuple[str, int]:
        absent = next(w for i, w in enumerate(self.members) if i not in self.came)
        name = next(iter(self.came.values())).name
        return f"rank {absent} to join {name}", absent


class Engine:
    """The event loop: who can run, which messages are under way, and what time it is on each port."""

    def __init__(self, cluster: Cluster, ranks: int, record: bool, shuffle: int | None, vectorise: bool):
        self.cluster, self.ranks, self.record, self.vectorise = cluster, ranks, record, vectorise
        self.alpha = [t.latency for t in cluster.tiers]
        self.gap = [1.0 / t.bandwidth for t in cluster.tiers]  # seconds a byte
        self.lookahead = min(self.alpha)
        self.out_free = [[0.0] * ranks for _ in self.alpha]
        self.in_free = [[0.0] * ranks for _ in self.alpha]
        self.hub = getcurrent()
        self.ready: list[Strand] = []
        # Started from the hub only: a greenlet started by another would count its frames to the recursion limit.
        self.starting: list[Strand] = []
        self.fresh: list[tuple] = []  # events not sorted in yet: (time, rank, lane, seq, Message or Meeting)
        self.events: list[tuple] = []
        self.sorted = True
        self.beside = [0] * ranks  # strands beside the program, for each rank
        self.lanes = [0] * ranks  # the last lane given out
        self.mains: list[Strand] = []
        self.alive: set[Strand] = set()
        self.channels: dict[tuple, Channel] = {}
        self.meetings: dict[tuple, Meeting] = {}
        self.failures: list[tuple[float, int, BaseException]] = []
        self.timeline: list[tuple] = []
        self.log: list[tuple] = []
        self.records: list[Record] = []
        self.notes: list[str] = []
        self.nominal = False
        self.over = False
        self.last_end = 0.0
        self.rng = random.Random(shuffle) if shuffle is not None else None

    # ------------------------------------------------------------------ strands

    def guard(self, strand: Strand, body: Callable[[Strand], None]) -> None:
        try:
            body(strand)
        except GreenletExit:
            pass
        except BaseException as error:  # told after the others have come to rest; see `run`
            self.failures.append((strand.clock, strand.rank, error))
        finally:
            strand.done = True
            self.alive.discard(strand)

    def run(self) -> None:
        """Run all strands to their end, or raise what stopped them."""
        collecting = gc.isenabled()
        gc.disable()  # millions of small objects, none of them in a cycle: looking for cycles would take most of the time
        try:
            while True:
                if self.rng:
                    self.rng.shuffle(self.ready)
                    self.rng.shuffle(self.starting)
                while self.starting or self.ready:
                    (self.starting or self.ready).pop().glet.switch()
                if self.failures:
                    self._raise_failure()
                if not self.settle():
                    break
            if self.alive:
                self._raise_deadlock()
            self._check_all_received()
        finally:
            if collecting:
                gc.enable()
            self.over = True
            for strand in list(self.alive):
                strand.glet.throw(GreenletExit)

    # ------------------------------------------------------------------ messages

    def settle(self) -> bool:
        """Settle the earliest messages on their in ports and wake who waited for them. False if there is none."""
        events, fresh = self.events, self.fresh
        if fresh:
            if len(fresh) * 4 > len(events):
                events.extend(fresh)
                events.sort()
                self.sorted = True
            else:
                for event in fresh:
                    heappush(events, event)
                self.sorted = False
            fresh.clear()
        if not events:
            return False
        first = events[0]
        if first[4].__class__ is Meeting:
            heappop(events)
            self.sorted = False
            self._decide(first[4], first[0])
            return True
        if first[4].start < 0:  # waits for its sender's out port
            heappop(events)
            self.sorted = False
            self._depart(first[4], first[0])
            return True
        limit = first[0] + self.lookahead
        if self.sorted and events[-1][0] <= limit:
            batch, self.events = events, []
            for i, event in enumerate(batch):
                if event[4].__class__ is Meeting or event[4].start < 0:
                    batch, self.events = batch[:i], batch[i:]
                    break
        else:
            batch = []
            while events and events[0][0] <= limit:
                if events[0][4].__class__ is Meeting or events[0][4].start < 0:
                    break
                batch.append(heappop(events))
            self.sorted = False
        in_free, log, ready = self.in_free, self.log, self.ready
        for head, src, _, _, m in batch:
            channel, dst = m.channel, m.dst
            ports = in_free[channel.tier]
            free = ports[dst]
            ports[dst] = m.arrival = (head if head > free else free) + m.nbytes * channel.gap
            log.append((src, dst, m.nbytes, m.start, m.arrival, m.round, channel.label, channel.tier, 1))
            receive = m.receive
            if receive is not None and receive.waits:
                receive.waits = False
                ready.append(receive.strand)
        return True

    def _depart(self, m: Message, at: float) -> None:
        """It is this message's turn to ask for its sender's out port."""
        channel = m.channel
        free = self.out_free[channel.tier][m.src]
        m.start = at if at > free else free
        m.sent = self.out_free[channel.tier][m.src] = m.start + m.nbytes * channel.gap
        self.fresh.append((m.start + channel.alpha, m.src, m.strand.lane, m.posted, m))
        if m.sender_waits and m.taken >= 0:
            m.sender_waits = False
            self.ready.append(m.strand)

    def _decide(self, meeting: Meeting, at: float) -> None:
        """The first member's turn in a ring collective of phantoms: all at once, or message by message?"""
        if meeting.slow or not meeting.entries:
            return
        entries = [meeting.entries.get(i) for i in range(len(meeting.members))]
        if None in entries or self._busy(meeting.members):
            meeting.slow = True
            self.ready.extend(strand for strand, _, _ in meeting.entries.values())
        else:
            vectorised.run_ring(self, meeting.members, entries)
            meeting.total = sum(payload.nbytes for _, _, payload in entries)
            self.ready.extend(strand for strand, _, _ in entries)
        meeting.entries = {}

    def _busy(self, members: tuple[int, ...]) -> bool:
        """Whether a message is under way from or to one of these ranks, or a collective runs beside its program."""
        inside = set(members)
        return any(self.beside[w] for w in members) or any(
            e[4].__class__ is Message and (e[4].src in inside or e[4].dst in inside) for e in self.events + self.fresh
        )

    # ------------------------------------------------------------------ what went wrong

    def _raise_failure(self) -> None:
        _, rank, error = min(self.failures, key=lambda f: f[:2])
        if isinstance(error, (CollectiveMismatchError, KeyboardInterrupt)):
            raise error
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _ours(f.filename)]
        text = "Traceback (most recent call last):\n" + "".join(traceback.format_list(frames))
        text += "".join(traceback.format_exception_only(type(error), error))
        raise RankError(rank, f"{type(error).__name__}: {error}", text) from error

    def _raise_deadlock(self) -> None:
        waiting, waits_for = {}, {}
        for strand in sorted(self.alive, key=lambda s: (s.rank, s.lane)):
            what, whom = strand.waits.why()
            inside = f", in {strand.call}" if strand.call else ""
            finished = " (which has finished)" if self.mains[whom].done else ""
            waiting.setdefault(strand.rank, f"{what}{finished}{inside}{_place(strand)}")
            if whom != strand.rank:
                waits_for[strand.rank] = whom
        cycle = _cycle(waits_for)
        lines = [f"  rank {rank} waits for {text}" for rank, text in list(waiting.items())[:16]]
        if len(waiting) > 16:
            lines.append(f"  and {len(waiting) - 16} more")
        if cycle:
            lines.append("  They wait in a circle: " + " → ".join(map(str, cycle)))
        head = f"deadlock: {len(waiting)} of {self.ranks} ranks wait and nothing is under way."
        raise DeadlockError("\n".join([head, *lines]), waiting, cycle)

    def _check_all_received(self) -> None:
        for channel in self.channels.values():
            if channel.sends:
                m = channel.sends[0]
                raise UnreceivedMessageError(
                    f"rank {m.src} sent {len(channel.sends)} message(s) to rank {m.dst} that nobody received "
                    f"(the first: {m.nbytes} bytes)"
                )
            if channel.receives:
                r = channel.receives[0]
                raise UnreceivedMessageError(f"rank {channel.dst} posted a receive from rank {r.src} that nothing answered")


RUNTIME = str(Path(__file__).parent)


def _ours(filename: str) -> bool:
    return filename.startswith(RUNTIME)


def _place(strand: Strand) -> str:
    """Where in the user's program a waiting strand stands."""
    frame = strand.glet.gr_frame
    while frame is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f" [{Path(frame.f_code.co_filename).name}:{frame.f_lineno}]" if frame else ""


def _cycle(waits_for: dict[int, int]) -> tuple[int, ...]:
    for first in waits_for:
        path, at = [first], waits_for[first]
        while at in waits_for and at not in path:
            path.append(at)
            at = waits_for[at]
        if at in path:
            circle = path[path.index(at) :]
            low = circle.index(min(circle))
            circle = circle[low:] + circle[:low]
            return (*circle, circle[0])
    return ()
