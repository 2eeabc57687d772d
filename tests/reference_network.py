"""A second simulator, slow and plain, that `manyranks.runtime.engine` is held against.

It knows no communicator, no greenlets and no lookahead. What each rank does is a list of actions, written down
beforehand; every action is carried out when the clock has come to it, one event at a time from one heap.

Actions of a strand:
    ("compute", seconds)
    ("isend", name, dst, nbytes)    name: how "wait" refers to it
    ("irecv", name, src)
    ("wait", name)                  a send: until it has left and its receiver has asked for it; a receive: until it is in
    ("start", lane)                 let that strand of this rank begin, not before it has come to the end of what it does
    ("join", lane, k)               wait until that strand has finished its k-th part
    ("begin",), ("end",)            in a strand beside the program: around the part that one "start" lets begin

A message of b bytes takes its turn on its sender's out port of the tier, holds it for b / bandwidth, reaches the
receiver's in port `latency` after it started, takes its turn there, and holds that for b / bandwidth.
"""

from __future__ import annotations

import heapq
from collections import deque

from manyranks.runtime.hardware import Cluster


class _Strand:
    def __init__(self, rank: int, lane, order: int, actions: list[tuple]):
        self.rank, self.lane, self.order, self.actions = rank, lane, order, actions
        self.at = 0  # the next action
        self.clock = 0.0
        self.names: dict = {}
        self.allowed = 0  # parts that have been started
        self.finished: list[float] = []  # when each part ended
        self.sent = 0


class _Message:
    def __init__(self, strand, dst, nbytes, number):
        self.strand, self.src, self.dst, self.nbytes, self.number = strand, strand.rank, dst, nbytes, number
        self.sent = self.arrival = self.taken = None


class _Receive:
    def __init__(self):
        self.message = None


def clocks(cluster: Cluster, programs: list[dict[int, list[tuple]]]) -> tuple[list[float], list[tuple]]:
    """When each rank's lane 0 ended, and every message as (start, src, dst, bytes, end), sorted.

    programs[rank][lane] is the list of that strand's actions, lane 0 first and the others in the order in which it starts
    them: so are simultaneous messages of one rank sent. Lanes of one name talk to each other. Raises RuntimeError if not
    all come to their end.
    """
    strands = {
        (r, lane): _Strand(r, lane, order, acts)
        for r, lanes in enumerate(programs)
        for order, (lane, acts) in enumerate(lanes.items())
    }
    heap: list[tuple] = []
    ports_out: dict[tuple, float] = {}
    ports_in: dict[tuple, float] = {}
    waiting: dict[tuple, deque] = {}  # (src, dst, is a collective's) -> messages, or receives
    log: list[tuple] = []
    number = 0

    def at(time: float, what: str, who) -> None:
        # At one moment in ports come first, then what strands do, then out ports; each by rank, lane, message.
        strand = who.strand if isinstance(who, _Message) else who
        order = (
            ("reach", "step", "ask").index(what),
            strand.rank,
            strand.order,
            who.number if isinstance(who, _Message) else 0,
        )
        heapq.heappush(heap, (time, order, next_event(), what, who))

    def next_event() -> int:
        nonlocal number
        number += 1
        return number

    def step(strand: _Strand, now: float) -> None:
        """Carry out the actions of `strand` that can be carried out now."""
        while strand.at < len(strand.actions):
            strand.clock = max(strand.clock, now)
            action = strand.actions[strand.at]
            kind = action[0]
            if kind == "compute":
                strand.at += 1
                if action[1] > 0:
                    strand.clock += action[1]
                    return at(strand.clock, "step", strand)
            elif kind == "isend":
                _, name, dst, nbytes = action
                strand.sent += 1
                m = strand.names[name] = _Message(strand, dst, nbytes, strand.sent)
                at(now, "ask", m)
                queue = waiting.setdefault((m.src, dst, strand.lane), deque())
                if queue and isinstance(queue[0], _Receive):
                    receive = queue.popleft()
                    receive.message, m.taken = m, receive.posted
                else:
                    queue.append(m)
                strand.at += 1
            elif kind == "irecv":
                _, name, src = action
                receive = strand.names[name] = _Receive()
                receive.posted, receive.strand = now, strand
                queue = waiting.setdefault((src, strand.rank, strand.lane), deque())
                if queue and isinstance(queue[0], _Message):
                    m = receive.message = queue.popleft()
                    m.taken = now
                    at(now, "step", m.strand)
                else:
                    queue.append(receive)
                strand.at += 1
            elif kind == "wait":
                thing = strand.names[action[1]]
                if isinstance(thing, _Message):
                    if thing.taken is None or thing.sent is None:
                        return
                    until = max(thing.sent, thing.taken)
                else:
                    if thing.message is None or thing.message.arrival is None:
                        return
                    until = thing.message.arrival
                if until > now:
                    return at(until, "step", strand)
                strand.at += 1
            elif kind == "start":
                beside = strands[strand.rank, action[1]]
                beside.allowed += 1
                at(now, "step", beside)
                strand.at += 1
            elif kind == "join":
                beside = strands[strand.rank, action[1]]
                if len(beside.finished) <= action[2]:
                    return
                strand.at += 1
            elif kind == "begin":
                if strand.allowed <= len(strand.finished):
                    return
                strand.at += 1
            elif kind == "end":
                strand.finished.append(now)
                at(now, "step", strands[strand.rank, 0])
                strand.at += 1

    for strand in strands.values():
        at(0.0, "step", strand)
    while heap:
        now, _, _, what, who = heapq.heappop(heap)
        if what == "step":
            if now >= who.clock:
                step(who, now)
        elif what == "ask":
            m = who
            tier = cluster.tier(m.src, m.dst)
            link = cluster.tiers[tier]
            m.start = max(now, ports_out.get((tier, m.src), 0.0))
            m.sent = ports_out[tier, m.src] = m.start + m.nbytes * (1.0 / link.bandwidth)
            at(m.start + link.latency, "reach", m)
            at(now, "step", m.strand)
        elif what == "reach":
            m = who
            tier = cluster.tier(m.src, m.dst)
            begin = max(now, ports_in.get((tier, m.dst), 0.0))
            m.arrival = ports_in[tier, m.dst] = begin + m.nbytes * (1.0 / cluster.tiers[tier].bandwidth)
            log.append((m.start, m.src, m.dst, m.nbytes, m.arrival))
            at(m.arrival, "step", strands[m.dst, m.strand.lane])
    left = [(s.rank, s.lane, s.actions[s.at]) for s in strands.values() if s.at < len(s.actions)]
    if left:
        raise RuntimeError(f"not at their end: {left}")
    return [strands[r, 0].clock for r in range(len(programs))], sorted(log)
