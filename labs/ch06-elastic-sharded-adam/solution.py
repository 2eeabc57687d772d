"""A sharded Adam that stops on one number of ranks and goes on with another."""

from __future__ import annotations

import math

import numpy as np


def shard_bounds(numel, ranks):
    """Where each rank's shard of a flat vector begins and ends: ranks + 1 offsets."""
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    base, extra = divmod(numel, ranks)
    return [r * base + min(r, extra) for r in range(ranks + 1)]


def shard_pieces(shapes, ranks, rank):
    """Which part of which tensor a rank's shard holds: (tensor, start, stop) in the tensor's own flat order."""
    sizes = [math.prod(shape) for shape in shapes]
    bounds = shard_bounds(sum(sizes), ranks)
    low, high = bounds[rank], bounds[rank + 1]
    pieces, offset = [], 0
    for i, size in enumerate(sizes):
        start, stop = max(low, offset) - offset, min(high, offset + size) - offset
        if start < stop:
            pieces.append((i, start, stop))
        offset += size
    return pieces


def peak_bytes(numel, ranks, rank, stage, micro_batches, weight_bytes=2, grad_bytes=4, state_bytes=12):
    """What a rank holds at the worst moment of a step, by kind, and the total."""
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage}")
    bounds = shard_bounds(numel, ranks)
    shard = bounds[rank + 1] - bounds[rank]
    if micro_batches == 1:
        elements = numel + shard
    else:
        elements = 2 * numel if stage == 1 else numel + 2 * shard
    held = {"weights": weight_bytes * numel, "gradients": grad_bytes * elements, "state": state_bytes * shard}
    return {**held, "total": sum(held.values())}


def _flat(tensors, dtype=np.float64):
    return np.concatenate([np.asarray(t, dtype=dtype).reshape(-1) for t in tensors])


def _cut(flat, shapes):
    out, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        out.append(flat[at : at + size].reshape(shape))
        at += size
    return out


def sharded_adam(
    comm,
    grads,
    params=None,
    checkpoint=None,
    stage=1,
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    clip=None,
    weight_dtype="float64",
):
    """Train len(grads) steps; every rank keeps its shard of the master weights and of the moments."""
    if checkpoint is None:
        shapes = [np.shape(p) for p in params]
        bounds = shard_bounds(sum(map(math.prod, shapes)), comm.size)
        master = _flat(params)[bounds[comm.rank] : bounds[comm.rank + 1]].copy()
        m, v, t = np.zeros_like(master), np.zeros_like(master), 0
    else:
        shapes = [np.shape(entry["master"]) for entry in checkpoint["tensors"]]
        state = load_shard(checkpoint, comm.size, comm.rank)
        master, m, v, t = state["master"], state["m"], state["v"], state["step"]
    decay = np.zeros_like(master)
    at = 0
    for i, start, stop in shard_pieces(shapes, comm.size, comm.rank):
        decay[at : at + stop - start] = lr * weight_decay * (len(shapes[i]) >= 2)
        at += stop - start

    norms, weights = [], None
    for step in grads:
        total = None
        for micro in step:
            part = _flat(micro)
            if stage == 2:
                part = comm.reduce_scatter(part)
            total = part if total is None else total + part
        if stage == 1:
            total = comm.reduce_scatter(total)
        g = total / (comm.size * len(step))
        norm = math.sqrt(float(comm.all_reduce(np.array([(g * g).sum()]))[0]))
        norms.append(norm)
        if math.isfinite(norm):
            if clip is not None and norm > clip:
                g = g * (clip / norm)
            t += 1
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            move = lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
            master = master * (1 - decay) - move
        weights = comm.all_gather(master.astype(weight_dtype))
    if weights is None:
        weights = comm.all_gather(master.astype(weight_dtype))
    return {
        "params": _cut(weights, shapes),
        "state": {"step": t, "master": master, "m": m, "v": v},
        "norms": norms,
    }


def save_checkpoint(states, shapes):
    """One checkpoint of all ranks' shards that doesn't depend on how many there were."""
    steps = {int(state["step"]) for state in states}
    if len(steps) != 1:
        raise ValueError(
            f"step differs between the ranks' states: {sorted(steps)}; they were saved at different times"
        )
    numel, bounds = sum(map(math.prod, shapes)), None
    bounds = shard_bounds(numel, len(states))
    for rank, state in enumerate(states):
        for name in ("master", "m", "v"):
            if len(state[name]) != bounds[rank + 1] - bounds[rank]:
                raise ValueError(
                    f"rank {rank}: {name} has {len(state[name])} elements, not its share of {numel}"
                )
    whole = {name: _cut(np.concatenate([s[name] for s in states]), shapes) for name in ("master", "m", "v")}
    tensors = [{name: whole[name][i] for name in whole} for i in range(len(shapes))]
    return {"step": steps.pop(), "tensors": tensors}


def load_shard(checkpoint, ranks, rank):
    """What one of `ranks` ranks needs of a checkpoint: its own shard of master, m and v, and the step."""
    tensors = checkpoint["tensors"]
    pieces = shard_pieces([np.shape(entry["master"]) for entry in tensors], ranks, rank)
    state = {"step": int(checkpoint["step"])}
    for name in ("master", "m", "v"):
        parts = [np.reshape(tensors[i][name], -1)[start:stop] for i, start, stop in pieces]
        state[name] = np.concatenate(parts) if parts else np.zeros(0)
    return state


if __name__ == "__main__":
    from manyranks import simulate

    shapes = [(5, 7), (7,), (3, 4, 2), ()]
    rng = np.random.default_rng(0)
    params = [rng.normal(size=shape) for shape in shapes]

    def gradients(ranks, steps, micro_batches=2):
        return [
            [[[rng.normal(size=s) for s in shapes] for _ in range(micro_batches)] for _ in range(steps)]
            for _ in range(ranks)
        ]

    numel = sum(map(math.prod, shapes))
    print(numel, "parameters on 4 ranks:", shard_bounds(numel, 4))
    print("rank 1 holds", shard_pieces(shapes, 4, 1))
    for stage in (1, 2):
        run = simulate(sharded_adam, inputs=gradients(4, 3), params=params, stage=stage, clip=1.0)
        sent = [int(b) for b in run.bytes_sent]
        print(
            f"stage {stage}: 3 steps of 2 micro-batches send {sent} bytes;"
            f" norms {[round(n, 3) for n in run.results[0]['norms']]}"
        )
    saved = save_checkpoint([r["state"] for r in run.results], shapes)
    run = simulate(sharded_adam, inputs=gradients(3, 2), checkpoint=saved)
    print(
        "resumed on 3 ranks: step",
        run.results[0]["state"]["step"],
        "with shards of",
        [len(r["state"]["m"]) for r in run.results],
    )
    for stage in (1, 2):
        held = peak_bytes(7_000_000_000, 8, 0, stage, micro_batches=4)
        print(
            f"7B on 8 ranks, stage {stage}, 4 micro-batches: {held['total'] / 1e9:g} GB at the worst moment"
        )
