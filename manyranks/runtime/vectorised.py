"""Collectives timed all at once, for the simulator at large scale.

`run_ring` does for a ring of phantoms, step by step but for all ranks in one array operation, exactly what the event
loop does message by message: the same additions and maxima in the same order, so the same clock to the bit.
`run_closed_form` takes the time from a formula instead, for the algorithms that are asked for by name.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from manyranks.runtime import costs, nccl
from manyranks.runtime.comm import Call
from manyranks.runtime.phantom import Phantom, is_phantom
from manyranks.runtime.schedules import chunk_bounds

if TYPE_CHECKING:
    from manyranks.runtime.engine import Engine, Strand

__all__ = ["CALLS", "FROM_RANKS", "result", "run_closed_form", "run_ring"]

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


def run_ring(engine: Engine, members: tuple[int, ...], entries: list[tuple[Strand, Call, Any]]) -> None:
    """Advance the clocks of all members of a ring collective to its end, ports and traffic with them."""
    n, call = len(members), entries[0][1]
    strands = [s for s, _, _ in entries]
    chunks = _chunk_bytes(call, [p for _, _, p in entries], n)
    shifts = _shifts(call, n)
    tiers = [engine.cluster.tier(w, members[(i + 1) % n]) for i, w in enumerate(members)]  # of the edge i -> i + 1
    alpha = np.array([engine.alpha[t] for t in tiers])
    gap = np.array([engine.gap[t] for t in tiers])
    t = np.array([s.clock for s in strands])
    out = np.array([engine.out_free[tier][w] for w, tier in zip(members, tiers)])
    in_ = np.array([engine.in_free[tiers[i - 1]][w] for i, w in enumerate(members)])
    first = np.maximum(t, out)
    rounds = np.array([s.round for s in strands])
    same_chunks = bool((chunks == chunks[0]).all())

    if same_chunks and all(len(set(v.tolist())) == 1 for v in (alpha, gap, t, first, rounds)) and (in_ <= t[0]).all():
        t, out, in_ = _uniform(t, first, in_, chunks[0] * gap[0], alpha[0], len(shifts))
    else:
        t, out, in_ = _general(t, out, in_, chunks, gap, alpha, shifts, same_chunks)
    ends = t.tolist()
    rounds = _rounds(rounds, len(shifts))

    sent = _sent(chunks, shifts, n)
    for i, strand in enumerate(strands):
        strand.clock, strand.round = ends[i], int(rounds[i])
        engine.out_free[tiers[i]][members[i]] = float(out[i])
        engine.in_free[tiers[i - 1]][members[i]] = float(in_[i])
        right = (i + 1) % n
        engine.log.append(
            (members[i], members[right], sent[i], float(first[i]), float(in_[right]), int(rounds[right]), call.name,
             tiers[i], len(shifts))
        )  # fmt: skip


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
    return np.full(n, clock), np.full(n, sent), np.full(n, arrived)


def _general(t, out, in_, chunks, gap, alpha, shifts, same_chunks):
    """Step by step, all ranks in one array operation.

    Arrays have a copy of the last rank before the first and of the first behind the last (clock: index i + 1 is rank i),
    so that "my left" and "my right neighbour" are views and nothing is moved.
    """
    n = len(t)
    clock, nxt = np.empty(n + 2), np.empty(n + 2)
    clock[1:-1], clock[0], clock[-1] = t, t[-1], t[0]
    begin = clock.copy()  # when a rank's next message leaves; from the second step on, its clock
    begin[1:-1] = np.maximum(t, out)
    begin[0] = begin[n]
    alpha_in = np.roll(alpha, 1)
    gap = np.concatenate([gap[-1:], gap])
    thrice = np.concatenate([chunks, chunks, chunks])
    same_gap = bool((gap == gap[0]).all())
    if same_gap:
        thrice = thrice * gap[0]
    took = thrice[: n + 1] if same_gap else thrice[: n + 1] * gap
    sent, head, in_ = np.empty(n), np.empty(n), in_.copy()
    for s in shifts:
        if not same_chunks:  # took[i + 1]: the chunk (i - s) mod n that rank i sends
            took = thrice[n - 1 - s : 2 * n - s] if same_gap else np.multiply(thrice[n - 1 - s : 2 * n - s], gap, out=took)
        np.add(begin[1:-1], took[1:], out=sent)
        np.add(begin[:-2], alpha_in, out=head)
        np.maximum(head, in_, out=in_)
        np.add(in_, took[:-1], out=in_)
        inner = nxt[1:-1]
        np.maximum(in_, sent, out=inner)
        np.maximum(inner, clock[2:], out=inner)  # a send ends once its receiver has asked for it
        nxt[0], nxt[-1] = nxt[n], nxt[1]
        clock, nxt = nxt, clock
        begin = clock  # past its own out port, so the next send starts at once
    return clock[1:-1], sent, in_


def _rounds(rounds: np.ndarray, steps: int) -> np.ndarray:
    if (rounds == rounds[0]).all():
        return rounds + steps
    for _ in range(steps):
        rounds = np.maximum(rounds, np.roll(rounds, 1) + 1)
    return rounds


def _sent(chunks: np.ndarray, shifts: list[int], n: int) -> list[int]:
    total = np.zeros(n)
    if len(shifts) >= n:  # all-reduce: all but chunk r in the first half, all but chunk r + 1 in the second
        total += 2 * chunks.sum() - chunks - np.roll(chunks, -1)
    elif shifts[0] == 1:
        total += chunks.sum() - chunks
    else:
        total += chunks.sum() - np.roll(chunks, -1)
    return [int(b) for b in total]


def result(call: Call, payload: Phantom, rank: int, n: int, total_bytes: int) -> Phantom:
    """What a ring collective gives `rank` of a group of `n` whose ranks together brought `total_bytes`."""
    if call.name == "all_reduce":
        return payload
    if call.name == "reduce_scatter":
        bounds = chunk_bounds(len(payload), n)
        return payload[bounds[rank] : bounds[rank + 1]]
    row = math.prod(payload.shape[1:]) * payload.itemsize
    return Phantom((total_bytes // row if row else 0, *payload.shape[1:]), payload.dtype)


def run_closed_form(
    engine: Engine, members: tuple[int, ...], entries: list[tuple[Strand, Call, Any]], combine: Any
) -> Any:
    """All-reduce by formula: everybody leaves when the last has come and the formula's time has passed.

    Ports are not used, so such a call neither disturbs other messages nor is disturbed. Returns the reduced array.
    """
    n, call = len(members), entries[0][1]
    total = entries[0][2] if is_phantom(entries[0][2]) else entries[0][2].copy()
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
