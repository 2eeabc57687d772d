"""Closes a bucket before a tensor that would overfill it, instead of after it.

fails: test_plan_closes_buckets_at_their_limit, test_plan_keeps_dtypes_apart, test_training_communicates_once_a_bucket
"""

import numpy as np
import solution
from solution import *  # noqa: F403


def bucket_plan(tensors, first, limit):
    if first <= 0 or limit <= 0:
        raise ValueError("limits must be positive")
    plan, opened = [], {}
    for i in reversed(range(len(tensors))):
        elements, dtype, trained = tensors[i]
        if not trained:
            continue
        size = elements * np.dtype(dtype).itemsize
        members, held = opened.get(dtype, ([], 0))
        if members and held + size > (limit if plan else first):
            plan.append(members)
            opened.pop(dtype)
            members, held = [], 0
        opened[dtype] = ([*members, i], held + size)
    return plan + [members for members, _ in opened.values()]


solution.bucket_plan = bucket_plan
