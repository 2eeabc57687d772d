"""Goes through the tensors from the first layer on.

fails: test_plan_closes_buckets_at_their_limit, test_plan_keeps_dtypes_apart, test_plan_skips_what_is_not_trained, test_best_limit, test_training_communicates_once_a_bucket
"""

import solution
from solution import *  # noqa: F403


def bucket_plan(tensors, first, limit, real=solution.bucket_plan):
    n = len(tensors)
    return [[n - 1 - i for i in bucket] for bucket in real(tensors[::-1], first, limit)]


solution.bucket_plan = bucket_plan
