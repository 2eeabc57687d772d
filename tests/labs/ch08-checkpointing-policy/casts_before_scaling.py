"""Gradients are cast to float16 first and scaled afterwards, when the small ones are gone.

fails: test_gradients_survive_sixteen_bits
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
            half = (np.asarray(gradient).astype(np.float16) * np.float16(state["scale"])).astype(np.float16)
        bad = comm.all_reduce(np.array([0.0 if np.isfinite(half).all() else 1.0]), op="max")
        overflow = bool(bad[0] > 0)
        if overflow:
            skipped.append(step)
        else:
            mean = comm.all_reduce(half.astype(np.float32) / np.float32(state["scale"])) / np.float32(
                comm.size
            )
            weights = weights - np.float32(lr) * mean
        state = scaler_update(state, overflow, growth_interval, hysteresis)
    return {"weights": weights, "state": state, "skipped": skipped, "scales": scales}
