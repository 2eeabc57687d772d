"""Averages the loss with an all-reduce of its own, rank by rank.

fails: test_training_with_any_shards, test_training_communicates_once_a_bucket, test_training_is_that_of_one_rank, test_training_clips_the_averaged_gradient
"""

import numpy as np
import solution
from solution import *  # noqa: F403

from manyranks.data_parallel import loss_and_gradient


def train_step(comm, shard, layers, micro_batch, lr, limit, clip=None, real=solution.train_step):
    x, targets = shard
    _, new = real(comm, shard, layers, micro_batch, lr, limit, clip)
    own = float(loss_and_gradient(layers, x, targets)[0]) if len(x) else 0.0
    return float(comm.all_reduce(np.array(own), op="mean")), new
