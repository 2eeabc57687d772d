"""All-reduces in every micro-batch, as DDP does without no_sync.

fails: test_gradient_weights_unequal_ranks_by_their_examples, test_one_all_reduce_a_bucket_and_step, test_communication_starts_before_the_backward_ends, test_buckets_leave_in_the_plans_order
"""

import solution
from solution import *  # noqa: F403


def ddp_gradient(comm, micro_batches, shapes, dtypes, seconds, plan, real=solution.ddp_gradient):
    sums, examples = None, 0
    for micro_batch in micro_batches:
        grads, n = real(comm, [micro_batch], shapes, dtypes, seconds, plan)
        sums = [g * n for g in grads] if sums is None else [s + g * n for s, g in zip(sums, grads)]
        examples += n
    return [s / examples for s in sums], examples
