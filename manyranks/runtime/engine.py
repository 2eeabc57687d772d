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
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
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
# Added to a tie-breaker: at one moment, out ports are given out when all that arrives then has arrived.
LAST = 1 << 100


class Strand:
    """Something with a clock that can wait: a rank's program (lane 0), or a collective running beside it."""

    __slots__ = (
        "engine", "rank", "lane", "clock", "round", "key", "glet", "resume", "waits", "call", "quiet", "done", "refused",
        "receive",
    )  # fmt: skip

    def __init__(self, engine: Engine, rank: int, lane: int):
        self.engine, self.rank, self.lane = engine, rank, lane
        self.clock = 0.0
        self.round = 0  # the longest chain of messages behind it
        # Numbers its messages: the tie-breaker between simultaneous ones.
        self.key = (rank << 24 | lane) << 40
        self.waits: Any = None
        self.call: Call | None = None  # the collective it is in
        self.quiet = False  # inside a collective: one interval is drawn for the whole call
        self.done = False
        self.refused = 0
        self.receive: Receive | None = None  # used again for every receive that waits at once
        self.glet = greenlet(engine.guard, engine.hub)
        self.resume: Callable = self.glet.switch
        engine.alive.add(self)

    def block(self, why: Any) -> None:
        """Let others run until somebody puts this strand on the ready list again."""
        engine = self.engine
        if engine.over or getcurrent() is not self.glet:
            self._refuse()
        self.waits = why
        if engine.ready:
            engine.ready.pop()()
        else:
            engine.to_hub()
        self.waits = None

    def _refuse(self) -> None:
        if getcurrent() is not self.glet:
            over = (
                " after its run" if self.engine.over else " from another rank's program, thread or simulation"
            )
            raise RuntimeError(
                f"rank {self.rank}'s communicator was called{over}; only that rank's own program may"
            )
        self.refused += 1
        if self.refused > 100:  # a program that swallows every exception, and asks again
            _IMMORTAL.append(self.glet)
            self.engine.to_hub()
        raise GreenletExit

    def advance(self, to: float, label: str) -> None:
        """Waited until `to`."""
        if to > self.clock:
            if not self.quiet:
                self.engine.timeline.append((self.rank, self.lane, "wait", label, self.clock, to))
            self.clock = to


_IMMORTAL: list[greenlet] = []  # freeing such a greenlet would raise in it once more, and so for ever


class Message(Work):
    """A message, and the sender's handle of it."""

    __slots__ = (
        "strand", "channel", "nbytes", "took", "payload", "round", "start", "sent", "arrival", "taken", "waiter",
        "sender_waits",
    )  # fmt: skip

    def wait(self) -> None:
        sent, taken = self.sent, self.taken
        if taken < 0 or sent < 0:
            self.sender_waits = True
            self.strand.block(self)
            sent, taken = self.sent, self.taken
        if taken > sent:
            sent = taken
        if sent > self.strand.clock:
            self.strand.advance(sent, "send")

    def why(self) -> tuple[str, int]:
        return f"rank {self.channel.dst} to receive its message", self.channel.dst


class Receive(Work):
    """A receive that was posted."""

    __slots__ = ("strand", "channel", "message", "posted", "waiter")

    def __init__(self, strand: Strand, channel: Channel, message: Message | None):
        self.strand, self.channel, self.message = strand, channel, message
        self.posted = strand.clock
        self.waiter: Strand | None = None  # the strand, once it waits, as long as there is no message

    def wait(self) -> Any:
        m, strand = self.message, self.strand
        if m is None:
            self.waiter = strand
            strand.block(self.channel)
            m = self.message
        elif m.arrival < 0:
            m.waiter = strand
            strand.block(self.channel)
        if m.arrival > strand.clock:
            strand.advance(m.arrival, "recv")
        if m.round > strand.round:
            strand.round = m.round
        return m.payload


class Channel:
    """The messages of one kind from one rank to another, first in, first out.

    What waits is either messages that nobody has asked for or receives that nothing has answered, never both. It is
    mostly one at a time, so the first has a place of its own and the queue behind it is made when it is needed.
    """

    __slots__ = ("first", "rest", "tier", "alpha", "gap", "out_free", "in_free", "label", "src", "dst")

    def __init__(self, engine: Engine, src: int, dst: int, label: str):
        self.first: Message | Receive | None = None
        self.rest: deque | None = None
        self.tier = tier = engine.cluster.tier(src, dst)
        self.alpha, self.gap = engine.alpha[tier], engine.gap[tier]
        self.out_free, self.in_free = engine.out_free[tier], engine.in_free[tier]
        self.label, self.src, self.dst = label, src, dst

    def put(self, waiting: Message | Receive) -> None:
        """Queue up behind `first`."""
        if self.rest is None:
            self.rest = deque()
        self.rest.append(waiting)

    def why(self) -> tuple[str, int]:
        return f"a message from rank {self.src}", self.src


class Pending(Work):
    """Handle of a collective that runs beside the program."""

    __slots__ = ("comm", "owner", "call", "lane", "result", "finished", "waits", "waited")

    def __init__(self, comm: Any, owner: Strand, call: Call):
        self.comm, self.owner, self.call = comm, owner, call
        self.lane: Strand | None = None
        self.result: Any = None
        self.finished: tuple[float, int] | None = None  # when, and after how many rounds
        self.waits = False
        self.waited = False

    def wait(self) -> Any:
        owner = self.owner
        if self.finished is None:
            self.waits = True
            owner.block(self)
        if not self.waited:  # from here on the program is past it in virtual time as well
            self.waited = True
            self.comm.outstanding -= 1
            owner.engine.turns[owner.rank] -= 1
        at, round_ = self.finished
        owner.advance(at, self.call.name)
        owner.round = max(owner.round, round_)
        return self.result

    def why(self) -> tuple[str, int]:
        own = f"its own {self.call.name} started with async_op=True"
        if self.lane is None or self.lane.waits is None:
            return own, self.owner.rank
        what, whom = self.lane.waits.why()
        return f"{own}, which waits for {what}", whom


class Meeting:
    """One collective call of a group: who has come, and with what."""

    __slots__ = ("members", "entries", "came", "state", "plan", "total", "error")

    def __init__(self, members: tuple[int, ...]):
        self.members = members
        self.entries: dict[int, tuple[Strand, Call, Any]] = {}  # those that wait here, by rank in the group
        self.came: dict[int, Call] = {}  # everybody so far
        self.state = "open"  # then "slow" (message by message), or "planned" and "done" (all at once)
        self.plan: Any = None
        self.total: Any = None  # reduced by a closed form; rows in a vectorised ring
        self.error: BaseException | None = None

    def why(self) -> tuple[str, int]:
        absent = next(
            (w for i, w in enumerate(self.members) if i not in self.came and i not in self.entries), None
        )
        if absent is None:
            return "all ranks to reach the same collective call", next(iter(self.entries.values()))[0].rank
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
        self.to_hub = self.hub.switch
        self.ready: list[Callable] = []  # `resume` of the strands that can run
        # Started from the hub only: a greenlet started by another would count its frames to the recursion limit.
        self.starting: list[tuple[Strand, Callable[[Strand], None]]] = []
        # Events are (time, tie-breaker, Message or Meeting). What is due is not known before all strands are at rest.
        self.fresh: list[tuple] = []  # not sorted in yet
        self.events: list[tuple] = []
        self.sorted = True
        # Ring collectives of phantoms that somebody has just entered: since when.
        self.forming: dict[Meeting, float] = {}
        self.meeting_keys = count(-1, -1)
        # Ports that a ring collective timed in advance relies on: (tier, rank) -> its Meeting, or when its last message comes from whom.
        self.planned: dict[tuple[int, int], Meeting | tuple[float, int]] = {}
        # For each rank: collectives beside it that it has not waited for, and messages in line for its out port. While
        # there are any, its messages take their turns in virtual time.
        self.turns = [0] * ranks
        self.lanes = [0] * ranks  # the last lane given out
        self.mains: list[Strand] = []
        self.alive: set[Strand] = set()
        self.channels: dict[tuple, Channel] = {}
        self.meetings: dict[tuple, Meeting] = {}
        self.mismatched: list[Meeting] = []
        self.failures: list[tuple[float, int, int, BaseException]] = []
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
        """What every greenlet runs."""
        try:
            body(strand)
        except GreenletExit:
            pass
        except KeyboardInterrupt:  # goes on to the hub, and ends the run at once
            if not self.over:
                raise
        except BaseException as error:  # told when its time has come; see `run`
            self.failures.append((strand.clock, strand.rank, strand.lane, error))
        finally:
            strand.done, strand.receive = True, None
            self.alive.discard(strand)

    def run(self) -> None:
        """Run all strands to their end, or raise what stopped them."""
        with _calm_collector():
            try:
                starting, ready = self.starting, self.ready
                while True:
                    if self.rng:
                        self.rng.shuffle(ready)
                        self.rng.shuffle(starting)
                    while ready or starting:
                        if starting:
                            strand, body = starting.pop()
                            strand.resume(strand, body)
                        else:
                            ready.pop()()
                    if self.mismatched:
                        self._raise_mismatch()
                    self._sort_in()
                    # Others that are earlier in virtual time may fail yet.
                    if self.failures and not (self.events and self.events[0][0] < min(self.failures)[0]):
                        self._raise_failure()
                    if not self.events:
                        break
                    self.settle()
                if self.alive:
                    self._raise_deadlock()
                self._check_all_received()
            finally:
                self._end()

    def _end(self) -> None:
        """Stop the strands that are left, and let go of everything, so that a run is freed without a collector."""
        self.over = True
        for strand in sorted(self.alive, key=lambda s: (s.rank, s.lane)):
            strand.glet.throw(GreenletExit)
        for strand in (*self.mains, *self.alive):
            strand.glet = strand.resume = None
        for held in (self.alive, self.channels, self.meetings, self.forming, self.planned):
            held.clear()
        for held in (self.mains, self.fresh, self.events, self.ready, self.starting):
            held.clear()
        self.mismatched.clear()
        self.failures.clear()

    # ------------------------------------------------------------------ messages

    def _sort_in(self) -> None:
        """Put the new events with the others."""
        events, fresh = self.events, self.fresh
        if self.forming:
            for meeting, since in self.forming.items():
                fresh.append((since, next(self.meeting_keys), meeting))
            self.forming.clear()
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

    def settle(self) -> None:
        """Settle the earliest messages on their in ports and wake who waited for them."""
        events = self.events
        head, key, first = events[0]
        if first.__class__ is Meeting or first.start < 0:
            heappop(events)
            self.sorted = False
            if first.__class__ is Meeting:
                self._decide(first, head)
            else:
                self._depart(first, head, key)
            return
        limit = head + self.lookahead
        if self.sorted and (events[-1][0] < limit or events[-1][0] == head):
            batch, self.events = events, []
        else:
            batch = []
            while events and (events[0][0] < limit or events[0][0] == head):
                m = events[0][2]
                if m.__class__ is Meeting or m.start < 0:
                    break
                batch.append(heappop(events))
            self.sorted = False
        append, wake, planned = self.log.append, self.ready.append, self.planned
        for head, key, m in batch:
            if m.__class__ is Meeting or m.start < 0 or (planned and self._disturbs(m, head)):
                # From here on it depends on what those woken so far do.
                rest = batch[batch.index((head, key, m)) :]
                if self.events:
                    for event in rest:
                        heappush(self.events, event)
                else:
                    self.events = rest
                return
            channel = m.channel
            ports, dst = channel.in_free, channel.dst
            free = ports[dst]
            ports[dst] = m.arrival = arrival = (head if head > free else free) + m.took
            append((channel.src, dst, m.nbytes, m.start, arrival, m.round, channel.label, channel.tier, 1))
            waiter = m.waiter
            if waiter is not None:
                m.waiter = None
                wake(waiter.resume)

    def _depart(self, m: Message, at: float, key: int) -> None:
        """It is this message's turn to ask for its sender's out port."""
        channel = m.channel
        src = channel.src
        free = channel.out_free[src]
        m.start = at if at > free else free
        m.sent = channel.out_free[src] = m.start + m.took
        self.turns[src] -= 1
        self.fresh.append((m.start + channel.alpha, key - LAST, m))
        if m.sender_waits and m.taken >= 0:
            m.sender_waits = False
            self.ready.append(m.strand.resume)

    # ------------------------------------------------------------------ ring collectives of phantoms, all at once

    def _decide(self, meeting: Meeting, at: float) -> None:
        """The first member's turn: all at once, or message by message? Later: has it stayed undisturbed?"""
        if meeting.state == "planned" and at == meeting.plan.first_end:
            self._commit(meeting)
        elif meeting.state == "open":
            if len(meeting.entries) < len(meeting.members):
                self._go_slow(meeting)
                return
            entries = [meeting.entries[i] for i in range(len(meeting.members))]
            meeting.plan = plan = vectorised.plan_ring(self, meeting.members, entries)
            held = (self.planned.get(port) for port in plan.ports) if self.planned else ()
            if any(h is not None and h[0] >= plan.first_head for h in held):
                # An earlier ring that was timed all at once still occupies one of its ports.
                self._go_slow(meeting)
            elif len(self.alive) == len(entries) and not self.events:  # nobody is left who could disturb it
                self._commit(meeting)
            else:
                # Its ports may still be wanted by others before its end. Nobody goes on until that is certain.
                meeting.state = "planned"
                self.planned.update(dict.fromkeys(plan.ports, meeting))
                self.fresh.append((plan.first_end, next(self.meeting_keys), meeting))

    def _commit(self, meeting: Meeting) -> None:
        plan = meeting.plan
        if meeting.state == "planned":
            for port in plan.ports:
                del self.planned[port]
        entries = [meeting.entries[i] for i in range(len(meeting.members))]
        vectorised.run_ring(self, meeting.members, entries, plan)
        # Whoever ends first may send to a member that has not ended: such a message must not come before the ring's.
        if plan.last_head >= plan.first_end:
            for i, port in enumerate(plan.ports):
                self.planned[port] = (plan.last_heads[i], meeting.members[i - 1])
        meeting.state, meeting.plan = "done", None
        meeting.total = sum(len(payload) if payload.ndim else 1 for _, _, payload in entries)
        self.ready.extend(strand.resume for strand, _, _ in entries)
        meeting.entries = {}

    def _go_slow(self, meeting: Meeting) -> None:
        if meeting.state == "planned":
            for port in meeting.plan.ports:
                del self.planned[port]
        meeting.state, meeting.plan = "slow", None
        self.ready.extend(strand.resume for strand, _, _ in meeting.entries.values())
        meeting.entries = {}

    def _disturbs(self, m: Message, head: float) -> bool:
        """Whether message `m` reaches a port that a ring timed in advance relies on. Then the ring goes slow."""
        port = (m.channel.tier, m.channel.dst)
        found = self.planned.get(port)
        if found is None:
            return False
        if found.__class__ is Meeting:
            self._go_slow(found)
            return True
        del self.planned[port]
        if (head, m.channel.src) < found:
            late = m.channel.in_free[m.channel.dst] - head
            self.notes.append(
                f"a message from rank {m.channel.src} to rank {m.channel.dst} met a ring collective that was timed all at "
                f"once, and was put behind it: up to {late:.3g} s late"
            )
        return False

    # ------------------------------------------------------------------ what went wrong

    def _raise_mismatch(self) -> None:
        """Of all pairs of ranks that disagree, name the lowest: who came first depends on the order of running them."""
        pairs = []
        for meeting in self.mismatched:
            calls = sorted((meeting.members[i], call) for i, call in meeting.came.items())
            a, call_a = calls[0]
            pairs.append((a, *next((b, call_a, c) for b, c in calls if c.agreement() != call_a.agreement())))
        a, b, call_a, call_b = min(pairs, key=lambda p: p[:2])
        raise CollectiveMismatchError(
            f"the ranks of a group must make the same collective call: rank {a} called {call_a}, rank {b} called {call_b}"
        )

    def _raise_failure(self) -> None:
        _, rank, _, error = min(self.failures, key=lambda f: f[:3])
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
        left = [c for c in self.channels.values() if c.first is not None]
        if not left:
            return
        channel = min(left, key=lambda c: (c.src, c.dst))
        if channel.first.__class__ is Receive:
            raise UnreceivedMessageError(
                f"rank {channel.dst} posted a receive from rank {channel.src} that nothing answered"
            )
        raise UnreceivedMessageError(
            f"rank {channel.src} sent {1 + len(channel.rest or ())} message(s) to rank {channel.dst} that nobody received "
            f"(the first: {channel.first.nbytes} bytes)"
        )


_COLLECTOR = threading.Lock()
_calm: list[tuple[int, int, int]] = []  # thresholds to go back to, one for each run under way


@contextmanager
def _calm_collector():
    """Let Python look for cycles seldom: a run makes millions of small objects, hardly any of them in a cycle.

    Not never: a program's own cycles (an autograd graph, say) may hold large arrays.
    """
    with _COLLECTOR:
        _calm.append(gc.get_threshold())
        gc.set_threshold(max(500_000, _calm[0][0]), *_calm[0][1:])
    try:
        yield
    finally:
        with _COLLECTOR:
            first = _calm[0]
            _calm.pop()
            if not _calm:
                gc.set_threshold(*first)


RUNTIME = str(Path(__file__).parent)


def _ours(filename: str) -> bool:
    return filename.startswith(RUNTIME)


def _place(strand: Strand) -> str:
    """Where in the user's program a waiting strand stands."""
    frame = strand.glet.gr_frame
    while frame is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    file = Path(frame.f_code.co_filename)
    if not file.exists() or "ipykernel" in file.parent.name:  # a notebook's cell has no name worth telling
        return f" [{frame.f_code.co_name}, line {frame.f_lineno}]"
    return f" [{file.name}:{frame.f_lineno}]"


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
