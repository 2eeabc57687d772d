"""Clips each rank's own gradient before the average.

fails: test_training_clips_the_averaged_gradient
"""

import numpy as np
import solution
from solution import *  # noqa: F403

from manyranks.data_parallel import flatten, loss_and_gradient, sgd_step, unflatten


def train_step(comm, shard, layers, micro_batch, lr, limit, clip=None, real=solution.train_step):
    if clip is None:
        return real(comm, shard, layers, micro_batch, lr, limit)
    x, targets = shard
    loss, flat = 0.0, flatten(layers) * 0
    if len(x):
        loss, grads = loss_and_gradient(layers, x, targets)
        flat = flatten(grads)
        flat = flat * min(1.0, clip / np.linalg.norm(flat)) * len(x)
    sums = comm.all_reduce(np.concatenate([flat, [loss * len(x), len(x)]]))
    return float(sums[-2] / sums[-1]), sgd_step(layers, unflatten(sums[:-2] / sums[-1], layers), lr)
