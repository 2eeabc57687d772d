"""Each rank looks at its own gradient and skips by itself; the others add up zeros for it.

fails: test_one_rank_overflows_and_all_skip
"""

import numpy as np
from solution import *  # noqa: F403
from solution import scaler_update


def scaled_training(comm, grads, weights, lr, state, growth_interval=2000, hysteresis=2):
    """SGD on float32 master weights with gradients that exist in float16 only, scaled."""
    weights = np.array(weights, dtype=np.float32)
    state, skipped, scales = dict(state), [], []
    for step, gradient in enumerate(grads):
        scales.append(state["scale"])
        with np.errstate(over="ignore"):
            half = (np.asarray(gradient) * state["scale"]).astype(np.float16)
        overflow = not np.isfinite(half).all()
        mine = half.astype(np.float32) / np.float32(state["scale"])
        mean = comm.all_reduce(np.zeros_like(mine) if overflow else mine) / np.float32(comm.size)
        if overflow:
            skipped.append(step)
        else:
            weights = weights - np.float32(lr) * mean
        state = scaler_update(state, overflow, growth_interval, hysteresis)
    return {"weights": weights, "state": state, "skipped": skipped, "scales": scales}
