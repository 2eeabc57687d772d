"""Puts tensors of different dtypes into one bucket.

fails: test_plan_keeps_dtypes_apart
"""

import numpy as np
import solution
from solution import *  # noqa: F403


def bucket_plan(tensors, first, limit):
    if first <= 0 or limit <= 0:
        raise ValueError("limits must be positive")
    plan, members, held = [], [], 0
    for i in reversed(range(len(tensors))):
        elements, dtype, trained = tensors[i]
        if not trained:
            continue
        members, held = [*members, i], held + elements * np.dtype(dtype).itemsize
        if held >= (limit if plan else first):
            plan.append(members)
            members, held = [], 0
    return plan + ([members] if members else [])


solution.bucket_plan = bucket_plan  # what builds on it gets this one
