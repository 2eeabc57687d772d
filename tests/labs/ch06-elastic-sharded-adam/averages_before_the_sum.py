"""Every micro-batch is divided by the number of all of them before anything is added: rounded many times.

fails: test_resumes_on_another_number_of_ranks
"""

import math

import numpy as np
from solution import *  # noqa: F403
from solution import _cut, _flat, load_shard, shard_bounds, shard_pieces


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
            part = _flat(micro) / (comm.size * len(step))
            if stage == 2:
                part = comm.reduce_scatter(part)
            total = part if total is None else total + part
        if stage == 1:
            total = comm.reduce_scatter(total)
        g = total
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
