"""Gathers all logits and computes the loss as on one rank.

fails: test_loss_does_not_gather_logits
"""

import numpy as np
from solution import *  # noqa: F403


def vocab_parallel_loss(comm, part, hidden, targets, words, z=0.0, ignore=-100):
    x, t = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    logits = comm.all_gather((x @ part).T.copy()).T[:, :words]
    valid = t != ignore
    scale, rows = valid / max(valid.sum(), 1), np.flatnonzero(valid)
    top = logits.max(axis=1, keepdims=True)
    exps = np.exp(logits - top)
    lse = np.log(exps.sum(axis=1)) + top[:, 0]
    picked = np.zeros(len(t))
    picked[rows] = logits[rows, t[rows]]
    d = exps / exps.sum(axis=1, keepdims=True) * (1 + 2 * z * lse)[:, None]
    d[rows, t[rows]] -= 1
    d *= scale[:, None]
    d = np.pad(d, ((0, 0), (0, part.shape[1] * comm.size - words)))
    d = d[:, comm.rank * part.shape[1] : (comm.rank + 1) * part.shape[1]]
    return (
        float((scale * (lse - picked + z * lse**2)).sum()),
        comm.all_reduce(d @ part.T).reshape(hidden.shape),
        x.T @ d,
    )
