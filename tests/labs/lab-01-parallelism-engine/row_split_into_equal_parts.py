"""Cuts x into equal parts, whatever the shards' widths are.

fails: test_row_split_equals_dense, test_only_the_row_split_communicates
"""

import numpy as np
import solution
from solution import *  # noqa: F403
from solution import ring_all_reduce


def tensor_parallel_matmul(shards, x, split, send=None):
    y = solution.tensor_parallel_matmul(shards, x, split)  # its checks, and the column split
    if split == "column":
        return y
    partial = [s @ part for s, part in zip(shards, np.array_split(x, len(shards)))]
    return ring_all_reduce([p.reshape(-1) for p in partial], send)[0].reshape(partial[0].shape)
