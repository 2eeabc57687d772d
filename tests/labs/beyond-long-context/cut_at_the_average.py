"""A shard ends as soon as it has its part of the whole work.

fails: test_split_balances_the_work, test_split_within_memory
"""

import numpy as np
from solution import *  # noqa: F403
from solution import _starts


def balanced_split(documents, ranks, window=None, most=None):
    """Offsets of contiguous shards."""
    begins = _starts(documents)
    tokens = len(begins)
    if most is not None and most * ranks < tokens:
        raise ValueError(f"most: {ranks} ranks of at most {most} tokens have no room for {tokens}")
    keys = np.minimum(np.arange(tokens) - begins + 1, window or tokens)
    before, bounds = np.concatenate([[0], np.cumsum(keys)]), [0]
    for r in range(1, ranks):
        at = int(np.searchsorted(before, r * before[-1] / ranks))
        if most is not None:
            at = min(max(at, tokens - (ranks - r) * most), bounds[-1] + most)
        bounds.append(at)
    return [*bounds, tokens]
