"""Collectives timed all at once, for the simulator at large scale.

`plan_ring` and `run_ring` do for a ring of phantoms, step by step but for all ranks in one array operation, exactly what the event
loop does message by message: the same additions and maxima in the same order, so the same clock to the bit.
`run_closed_form` takes the time from a formula instead, for the algorithms that are asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from manyranks.runtime import costs, nccl
from manyranks.runtime.comm import Call
from manyranks.runtime.phantom import Phantom, is_phantom
from manyranks.runtime.schedules import chunk_bounds

if TYPE_CHECKING:
    from manyranks.runtime.engine import Engine, Strand

__all__ = ["CALLS", "FROM_RANKS", "Plan", "plan_ring", "result", "run_closed_form", "run_ring"]

CALLS = ("all_reduce", "reduce_scatter", "all_gather")
FROM_RANKS = 16  # smaller groups gain little


def _chunk_bytes(call: Call, payloads: list[Any], n: int) -> np.ndarray:
    """Bytes of chunk i, for each i; float64, shape (n,)."""
    if call.name == "all_gather":
        return np.array([p.nbytes for p in payloads], dtype=float)
    x = payloads[0]
    length = x.size if call.name == "all_reduce" else len(x)
    unit = x.itemsize if call.name == "all_reduce" else x.nbytes // max(len(x), 1)
    return np.diff(np.array(chunk_bounds(length, n), dtype=float)) * unit


def _shifts(call: Call, n: int) -> list[int]:
    """For each step, the s of "rank r sends chunk (r - s) mod n"."""
    scatter, gather = [k + 1 for k in range(n - 1)], list(range(n - 1))
    return {"reduce_scatter": scatter, "all_gather": gather, "all_reduce": scatter + gather}[call.name]


@dataclass
class Plan:
    """When a ring collective ends for each member, if nobody disturbs it."""

    ports: list[tuple[int, int]]  # (tier, rank): the in ports that it uses, by member
    tiers: list[int]  # of the edge from member i to i + 1
    clock: np.ndarray  # at the end of each member
    out_free: np.ndarray
    in_free: np.ndarray
    first: np.ndarray  # start of each member's first message
    last_heads: list[float]  # when the last message reaches each in port
    chunks: np.ndarray
    shifts: list[int]
    first_head: float
    last_head: float
    first_end: float


def plan_ring(engine: Engine, members: tuple[int, ...], entries: list[tuple[Strand, Call, Any]]) -> Plan:
    """Time a ring collective whose members have all come. Changes nothing yet."""
    n, call = len(members), entries[0][1]
    chunks = _chunk_bytes(call, [p for _, _, p in entries], n)
    shifts = _shifts(call, n)
    tier_of = engine.cluster.tier
    tiers = [tier_of(w, members[(i + 1) % n]) for i, w in enumerate(members)]
    alpha = np.array([engine.alpha[t] for t in tiers])
    gap = np.array([engine.gap[t] for t in tiers])
    t = np.array([s.clock for s, _, _ in entries])
    out = np.array([engine.out_free[tier][w] for w, tier in zip(members, tiers)])
    in_ = np.array([engine.in_free[tiers[i - 1]][w] for i, w in enumerate(members)])
    first = np.maximum(t, out)
    same_chunks = bool((chunks == chunks[0]).all())
    alike = same_chunks and all(bool((v == v[0]).all()) for v in (alpha, gap, t, first))
    if alike and bool((in_ <= t[0]).all()):
        t, out, in_, heads = _uniform(t, first, in_, chunks[0] * gap[0], alpha[0], len(shifts))
    else:
        p = _period(engine.cluster.gpus_per_node, t, first, in_, alpha, gap, chunks)
        found = _general(t[:p], first[:p], in_[:p], chunks[:p], gap[:p], alpha[:p], shifts)
        t, out, in_, heads = found if p == n else (np.tile(v, n // p) for v in found)
    ports = [(tiers[i - 1], w) for i, w in enumerate(members)]
    return Plan(ports, tiers, t, out, in_, first, heads.tolist(), chunks, shifts, float((first + alpha).min()),
                float(heads.max()), float(t.min()))  # fmt: skip


def run_ring(
    engine: Engine, members: tuple[int, ...], entries: list[tuple[Strand, Call, Any]], plan: Plan
) -> None:
    """Advance the clocks of all members of a ring collective to its end, ports and traffic with them."""
    n, name, steps, tiers = len(members), entries[0][1].name, len(plan.shifts), plan.tiers
    rounds = _rounds(np.array([s.round for s, _, _ in entries]), steps).tolist()
    ends, out, in_, first = (
        plan.clock.tolist(),
        plan.out_free.tolist(),
        plan.in_free.tolist(),
        plan.first.tolist(),
    )
    sent = _sent(plan.chunks, plan.shifts, n)
    for i, (strand, _, _) in enumerate(entries):
        strand.clock, strand.round = ends[i], rounds[i]
        engine.out_free[tiers[i]][members[i]] = out[i]
        engine.in_free[tiers[i - 1]][members[i]] = in_[i]
        right = (i + 1) % n
        engine.log.append(
            (members[i], members[right], sent[i], first[i], in_[right], rounds[right], name, tiers[i], steps)
        )


def _uniform(t, first, in_, took: float, alpha: float, steps: int):
    """All ranks alike: one of them stands for all. Every step, with the event loop's own additions."""
    clock, arrived, begin = float(t[0]), float(in_.max()), float(first[0])
    for _ in range(steps):
        sent = begin + took
        head = begin + alpha
        arrived = (head if head > arrived else arrived) + took
        clock = sent if sent > arrived else arrived
        begin = clock
    n = len(t)
    return np.full(n, clock), np.full(n, sent), np.full(n, arrived), np.full(n, head)


def _period(p: int, *vectors: np.ndarray) -> int:
    """How many ranks, counted from the first, stand for all: p, if the vectors repeat themselves after p, or all."""
    n = len(vectors[0])
    if 1 < p < n and n % p == 0 and all(bool((v.reshape(-1, p) == v[:p]).all()) for v in vectors):
        return p
    return n


def _general(t, first, in_, chunks, gap, alpha, shifts):
    """Step by step, all ranks in one array operation, with the event loop's own additions and maxima.

    Arrays have a copy of the last rank before the first and of the first behind the last (index i + 1 is rank i), so that
    "my left" and "my right neighbour" are views and nothing is moved. Few arrays, so that they stay in the cache.
    """
    n = len(t)
    clock, nxt = np.empty(n + 2), np.empty(n + 2)
    clock[1:-1], clock[0], clock[-1] = t, t[-1], t[0]
    begin = np.concatenate([first[-1:], first, first[:1]])  # when a rank's next message leaves
    alpha_in = np.roll(alpha, 1) if (alpha != alpha[0]).any() else np.array(alpha[0])
    in_ = in_.copy()
    held = _Held(chunks, gap)
    for step, s in enumerate(shifts):
        took = held.at(s)
        inner = nxt[1:-1]
        np.add(begin[:-2], alpha_in, out=inner)  # it reaches my in port
        if step == len(shifts) - 1:
            heads, sent = inner.copy(), begin[1:-1] + took[1:]
        np.maximum(inner, in_, out=in_)
        np.add(in_, took[:-1], out=in_)  # it has arrived
        np.add(begin[1:-1], took[1:], out=inner)  # mine has left
        np.maximum(inner, in_, out=inner)
        np.maximum(inner, clock[2:], out=inner)  # a send ends once its receiver has asked for it
        nxt[0], nxt[-1] = nxt[n], nxt[1]
        clock, nxt = nxt, clock
        begin = clock  # past its own out port, so from the second step on a send starts at once
    return clock[1:-1], sent, in_, heads


class _Held:
    """How long the message that each rank sends in a step holds its ports; index i + 1 is rank i, index 0 the last one."""

    def __init__(self, chunks: np.ndarray, gap: np.ndarray):
        self.n = len(chunks)
        self.chunks, self.gap = chunks, np.concatenate([gap[-1:], gap])
        self.same_gap = bool((gap == gap[0]).all())
        self.same_chunks = bool((chunks == chunks[0]).all())
        if self.same_chunks:
            self.took = chunks[0] * self.gap
        elif self.same_gap:
            self.thrice = np.concatenate([chunks, chunks, chunks]) * gap[0]
        else:
            self.shift: int | None = None
            self.where = np.flatnonzero(chunks != np.roll(chunks, -1))  # chunk i differs from chunk i + 1
            self.few = len(self.where) <= 16

    def at(self, s: int) -> np.ndarray:
        """Rank r sends chunk (r - s) mod n."""
        if self.same_chunks:
            return self.took
        n = self.n
        if self.same_gap:
            return self.thrice[n - 1 - s : 2 * n - s]
        if self.shift is not None and self.few and s == self.shift + 1:
            # Only ranks at an edge between chunks of different size send another size than in the step before.
            for i in self.where:
                r = (int(i) + s) % n + 1  # was to send chunk i + 1, and sends chunk i
                self.took[r] = self.chunks[i] * self.gap[r]
                if r == n:
                    self.took[0] = self.took[n]
        else:
            self.took = np.roll(self.chunks, s)[np.arange(-1, n)] * self.gap
        self.shift = s
        return self.took


def _rounds(rounds: np.ndarray, steps: int) -> np.ndarray:
    if (rounds == rounds[0]).all():
        return rounds + steps
    for _ in range(steps):
        rounds = np.maximum(rounds, np.roll(rounds, 1) + 1)
    return rounds


def _sent(chunks: np.ndarray, shifts: list[int], n: int) -> list[int]:
    whole, mine, next_ = int(chunks.sum()), chunks.astype(int), np.roll(chunks, -1).astype(int)
    if len(shifts) >= n:  # all-reduce: all but chunk r in the first half, all but chunk r + 1 in the second
        return (2 * whole - mine - next_).tolist()
    return (whole - (mine if shifts[0] == 1 else next_)).tolist()


def result(call: Call, payload: Phantom, rank: int, n: int, rows: int) -> Phantom:
    """What a ring collective gives `rank` of a group of `n` whose ranks together brought `rows` along axis 0."""
    if call.name == "all_reduce":
        return payload
    if call.name == "reduce_scatter":
        bounds = chunk_bounds(len(payload), n)
        return payload[bounds[rank] : bounds[rank + 1]]
    return Phantom((rows, *payload.shape[1:]), payload.dtype)


def run_closed_form(
    engine: Engine, members: tuple[int, ...], entries: list[tuple[Strand, Call, Any]], combine: Any
) -> Any:
    """All-reduce by formula: everybody leaves when the last has come and the formula's time has passed.

    Ports are not used, so such a call neither disturbs other messages nor is disturbed. Returns the reduced array.
    """
    n, call = len(members), entries[0][1]
    total = entries[0][2]
    # phantoms that agree add up to one like them
    if not all(is_phantom(payload) for _, _, payload in entries):
        total = total if is_phantom(total) else total.copy()
        for _, _, payload in entries[1:]:
            total = combine(total, payload)
    edges = [engine.cluster.tier(w, members[(i + 1) % n]) for i, w in enumerate(members)]
    if call.algorithm == "nccl":
        nodes = len({engine.cluster.node_of(w) for w in members})
        took = float(nccl.all_reduce_seconds(call.nbytes, engine.cluster, ranks=n, nodes=nodes))
    else:
        slowest = max(edges)
        tier = engine.cluster.tiers[slowest]
        took = float(costs.ring_all_reduce_seconds(call.nbytes, n, tier.latency, tier.bandwidth))
    began = max(s.clock for s, _, _ in entries)
    rounds = max(s.round for s, _, _ in entries) + 2 * (n - 1)
    for i, (strand, _, _) in enumerate(entries):
        strand.clock, strand.round = began + took, rounds
        bytes_ = 2 * call.nbytes * (n - 1) // n
        engine.log.append((members[i], members[(i + 1) % n], bytes_, began, began + took, rounds, call.name, edges[i],
                           2 * (n - 1)))  # fmt: skip
    engine.nominal = True
    note = f"all_reduce of {n} ranks timed by a formula ({call.algorithm}), its bytes set down as the ring's"
    if note not in engine.notes:
        engine.notes.append(note)
    return total
