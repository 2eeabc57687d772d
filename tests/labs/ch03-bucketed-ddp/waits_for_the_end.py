"""Starts the first all-reduce when the backward pass has ended.

fails: test_communication_starts_before_the_backward_ends
"""

import math

import numpy as np
from solution import *  # noqa: F403


def ddp_gradient(comm, micro_batches, shapes, dtypes, seconds, plan):
    sums = [np.zeros(s, d) for s, d in zip(shapes, dtypes)]
    for n, grads in micro_batches:
        for i in reversed(range(len(shapes))):
            comm.compute(seconds=seconds[i])
            sums[i] = sums[i] + (n * np.asarray(grads[i])).astype(dtypes[i])
    works = []
    for bucket in plan:
        parts = [sums[i].reshape(-1) for i in bucket]
        if not works:
            parts.append(np.array([sum(n for n, _ in micro_batches)], parts[0].dtype))
        works.append(comm.all_reduce(np.concatenate(parts), async_op=True))
    out = list(sums)
    for number, (bucket, work) in enumerate(zip(plan, works)):
        flat = work.wait()
        if number == 0:
            total = float(flat[-1])
        for i in bucket:
            size = math.prod(shapes[i])
            out[i], flat = (flat[:size] / total).reshape(shapes[i]).astype(dtypes[i]), flat[size:]
    return out, int(total)
