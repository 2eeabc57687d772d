"""Averages the ranks' means: right for equal shares only.

fails: test_gradient_weights_unequal_ranks_by_their_examples, test_one_all_reduce_a_bucket_and_step, test_buckets_leave_in_the_plans_order
"""

import numpy as np
import solution
from solution import *  # noqa: F403


def ddp_gradient(comm, micro_batches, shapes, dtypes, seconds, plan, real=solution.ddp_gradient):
    own = max(sum(n for n, _ in micro_batches), 1)
    grads, total = real(comm, [(n / own, g) for n, g in micro_batches], shapes, dtypes, seconds, plan)
    # `total` is now the number of ranks (rounded), so that `grads` is the mean over ranks; the examples by another call
    return grads, int(comm.all_reduce(np.array([sum(n for n, _ in micro_batches)]))[0])
