"""Mixture of experts with replicated experts, where a token crosses a network once for each node that it visits."""

from __future__ import annotations

import numpy as np


def replicas(loads, slots, most):
    """How often each expert is held, so that the largest load of one copy is as small as it can be."""
    if not len(loads) <= slots <= len(loads) * most:
        raise ValueError(
            f"slots must be {len(loads)} to {len(loads) * most} for {len(loads)} experts, got {slots}"
        )
    copies = [1] * len(loads)
    for _ in range(slots - len(loads)):
        open_ones = [e for e in range(len(loads)) if copies[e] < most]
        copies[max(open_ones, key=lambda e: loads[e] / copies[e])] += 1
    return copies


def place(loads, copies, ranks):
    """The experts of each rank: equally many, all different, with loads that differ by one copy's at most."""
    slots, left = divmod(sum(copies), ranks)
    if left or max(copies) > ranks:
        raise ValueError(
            f"copies: {copies} can't be dealt out to {ranks} ranks, each with the same number of experts"
        )
    share = [load / n for load, n in zip(loads, copies)]
    held = [[] for _ in range(ranks)]
    at = 0
    for e in sorted(range(len(loads)), key=lambda e: -share[e]):  # round and round: no rank gets a copy twice
        for _ in range(copies[e]):
            held[at % ranks].append(e)
            at += 1
    while True:  # as long as the fullest rank can give a copy and take a lighter one, to the good of both
        load = [sum(share[e] for e in mine) for mine in held]
        full = max(range(ranks), key=lambda r: load[r])
        best = (0.0, None)
        for other in range(ranks):
            for i, a in enumerate(held[full]):
                for j, b in enumerate(held[other]):
                    if a in held[other] or b in held[full]:
                        continue
                    gain = load[full] - max(
                        load[full] - share[a] + share[b], load[other] + share[a] - share[b]
                    )
                    if gain > max(best[0], 1e-9 * load[full]):
                        best = (gain, (other, i, j))
        if best[1] is None:
            return [sorted(mine) for mine in held]
        other, i, j = best[1]
        held[full][i], held[other][j] = held[other][j], held[full][i]


def choose_replicas(chosen, placement, rank, node):
    """Which rank serves each choice: this one, else one of this node, else any, in turn from token to token."""
    chosen = np.asarray(chosen)
    ranks = np.full(chosen.shape, -1, dtype=np.int64)
    for t, row in enumerate(chosen):
        for j, expert in enumerate(row):
            if expert < 0:
                continue
            holders = [r for r, mine in enumerate(placement) if expert in mine]
            near = [r for r in holders if r // node == rank // node]
            holders = [rank] if rank in holders else near or holders
            ranks[t, j] = holders[t % len(holders)]
    return ranks


def count_rows(ranks, rank, node):
    """Rows that travel between nodes and inside nodes in the dispatch of this rank's tokens."""
    across = inside = 0
    for row in np.asarray(ranks):
        visited = {int(r) for r in row if r >= 0}
        for there in {r // node for r in visited}:
            across += there != rank // node
            door = there * node + rank % node
            inside += len({r for r in visited if r // node == there} - {door})
    return {"across": across, "inside": inside}


def _route(rows, keys, places):
    """For each of `places` the distinct rows that go there, and for every choice its number in that list."""
    picked = [np.unique(rows[keys == p]) for p in range(places)]
    numbers = np.zeros(len(rows), dtype=np.int64)
    for p, mine in enumerate(picked):
        numbers[keys == p] = np.searchsorted(mine, rows[keys == p])
    return picked, numbers


class _Hop:
    """Rows to the members of a group and back; a row goes to each member once, whatever it is wanted for."""

    def __init__(self, group, rows, keys, notes):
        """Choice i is about row `rows[i]`, and goes to member `keys[i]` with the numbers `notes[i]`."""
        self.group, self.rows, self.keys = group, rows, keys
        self.picked, numbers = _route(rows, keys, group.size)
        notes = np.concatenate([numbers[:, None].astype(float), notes], axis=1)
        come = group.all_to_all([notes[keys == p] for p in range(group.size)])
        self.sizes = [len(part) for part in come]
        self.notes = np.concatenate([part[:, 1:] for part in come])
        counts = [int(part[:, 0].max()) + 1 if len(part) else 0 for part in come]  # rows from each member
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.row_of = np.concatenate([part[:, 0].astype(np.int64) + s for part, s in zip(come, self.starts)])

    def out(self, x):
        """The rows `x` of those who have them, where they are wanted."""
        return np.concatenate(self.group.all_to_all([x[mine] for mine in self.picked]))

    def back(self, y, shape):
        """The sum, row by row, of what all members made of it."""
        parts = self.group.all_to_all([y[a:b] for a, b in zip(self.starts, self.starts[1:])])
        total = np.zeros(shape)
        for mine, part in zip(self.picked, parts):
            total[mine] += part
        return total

    def answers(self, values):
        """One number for each choice, at home again."""
        ends = np.cumsum(self.sizes)
        parts = self.group.all_to_all([values[end - n : end] for end, n in zip(ends, self.sizes)])
        home = np.zeros(len(self.rows))
        for p, part in enumerate(parts):
            home[self.keys == p] = part
        return home


def moe_layer(comm, part, placement, node):
    """The layer's output for this rank's tokens; with part["dy"] also the gradients."""
    x, weight, experts = part["x"], part["weight"], part["experts"]
    chosen, ranks = np.asarray(part["chosen"]), np.asarray(part["ranks"])
    nodes = comm.size // node
    rail = comm.group([n * node + comm.rank % node for n in range(nodes)])
    home = comm.group([comm.rank // node * node + i for i in range(node)])

    # Two hops: to the same place in each node, then inside the node. Tokens for the own node stay where they are.
    token, slot = np.nonzero(chosen >= 0)
    goal = ranks[token, slot]
    notes = np.stack([goal % node, chosen[token, slot], weight[token, slot]], axis=1).astype(float)
    first = _Hop(rail, token, goal // node, notes)
    arrived = first.notes
    second = _Hop(home, first.row_of, arrived[:, 0].astype(np.int64), arrived[:, 1:])
    between, wanted = int(first.starts[-1]), second.notes[:, 0].astype(np.int64)
    h = x.shape[1]
    xs = second.out(first.out(x))

    ys, inner = np.zeros_like(xs), {}
    for e in sorted(experts):
        mine = np.flatnonzero(wanted == e)
        inner[e] = np.maximum(xs[second.row_of[mine]] @ experts[e]["w1"], 0.0)
        ys[second.row_of[mine]] += second.notes[mine, 1:] * (inner[e] @ experts[e]["w2"])
    y = first.back(second.back(ys, (between, h)), x.shape)
    if part.get("dy") is None:
        return {"y": y}

    dys = second.out(first.out(part["dy"]))
    dxs, slopes, grads = np.zeros_like(xs), np.zeros(len(wanted)), {}
    for e in sorted(experts):
        mine = np.flatnonzero(wanted == e)
        rows, w1, w2 = second.row_of[mine], experts[e]["w1"], experts[e]["w2"]
        slopes[mine] = (dys[rows] * (inner[e] @ w2)).sum(axis=1)
        dout = second.notes[mine, 1:] * dys[rows]
        dinner = (dout @ w2.T) * (inner[e] > 0)
        dxs[rows] += dinner @ w1.T
        grads[e] = {"w1": xs[rows].T @ dinner, "w2": inner[e].T @ dout}
    dx = first.back(second.back(dxs, (between, h)), x.shape)
    dweight = np.zeros(weight.shape)
    dweight[token, slot] = first.answers(second.answers(slopes))
    for e in sorted(experts):  # in one order everywhere, or ranks would wait for each other
        holders = [r for r, mine in enumerate(placement) if e in mine]
        if len(holders) > 1:
            group = comm.group(holders)
            grads[e] = {name: group.all_reduce(g) for name, g in grads[e].items()}
    return {"y": y, "dx": dx, "dweight": dweight, "grads": grads}


def keep_heaviest(comm, chosen, weight, experts, capacity):
    """Which of this rank's choices are among the `capacity` heaviest of their expert, over all ranks."""
    chosen, weight = np.asarray(chosen), np.asarray(weight)
    token, slot = np.nonzero(chosen >= 0)

    def heaviest(expert, weight):
        """Positions of the heaviest of each expert, in order; earlier ones first among equals."""
        kept = []
        for e in range(experts):
            mine = np.flatnonzero(expert == e)
            kept.append(mine[np.argsort(-weight[mine], kind="stable")[:capacity]])
        return np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)

    own = heaviest(chosen[token, slot], weight[token, slot])
    token, slot = token[own], slot[own]
    rows = np.stack([np.full(len(own), comm.rank), chosen[token, slot], weight[token, slot]], axis=1)
    everybody = comm.all_gather(rows.astype(float))
    final = np.zeros(len(everybody), dtype=bool)
    final[heaviest(everybody[:, 1], everybody[:, 2])] = True
    keep = np.zeros(chosen.shape, dtype=bool)
    keep[token, slot] = final[everybody[:, 0] == comm.rank]
    return keep


def update_bias(comm, bias, chosen, rate):
    """The biases of the experts after a step: up for those with fewer tokens than the average, down for others."""
    chosen = np.asarray(chosen).reshape(-1)
    counts = comm.all_reduce(np.bincount(chosen[chosen >= 0], minlength=len(bias)).astype(np.int64))
    return bias + rate * np.sign(counts.sum() - len(bias) * counts)


if __name__ == "__main__":
    from manyranks import simulate

    loads, ranks, node = [310, 40, 75, 120, 25, 160, 30, 40], 4, 2
    copies = replicas(loads, 12, ranks)
    placement = place(loads, copies, ranks)
    share = [load / n for load, n in zip(loads, copies)]
    print("copies", copies, "on", placement)
    print("loads", [round(sum(share[e] for e in mine), 1) for mine in placement], "mean", sum(loads) / ranks)

    rng = np.random.default_rng(0)
    h, f, k, tokens = 64, 16, 3, 20
    weights = [{"w1": rng.normal(size=(h, f)), "w2": rng.normal(size=(f, h))} for _ in loads]
    parts, rows = [], {"across": 0, "inside": 0}
    for r in range(ranks):
        p = np.array(loads) / sum(loads)
        chosen = np.array([rng.choice(len(loads), k, replace=False, p=p) for _ in range(tokens)])
        goal = choose_replicas(chosen, placement, r, node)
        for name, n in count_rows(goal, r, node).items():
            rows[name] += n
        parts.append(
            {
                "x": rng.normal(size=(tokens, h)), "chosen": chosen, "weight": np.full((tokens, k), 1 / k), "ranks": goal,
                "experts": {e: weights[e] for e in placement[r]},
            }
        )  # fmt: skip
    run = simulate(moe_layer, inputs=parts, placement=placement, node=node)
    across = sum(m.bytes for m in run.traffic if m.source // node != m.destination // node)
    print(f"{ranks * tokens * k} choices of {ranks * tokens} tokens; rows in a dispatch: {rows}")
    print(f"dispatch and combine send {across} bytes between nodes, rows alone {2 * 8 * h * rows['across']}")
