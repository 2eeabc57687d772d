"""Cuts x by the widths of the shards without checking that they tile it.

fails: test_shards_that_do_not_fit_are_refused
"""

import numpy as np
from solution import *  # noqa: F403
from solution import ring_all_reduce


def tensor_parallel_matmul(shards, x, split, send=None):
    if split == "column":
        return np.concatenate([s @ x for s in shards])
    partial, start = [], 0
    for s in shards:
        partial.append(s @ x[start : start + s.shape[1]])
        start += s.shape[1]
    return ring_all_reduce([p.reshape(-1) for p in partial], send)[0].reshape(partial[0].shape)
