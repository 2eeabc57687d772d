"""The next rank is the next number, whether it has tokens or not.

fails: test_forward_with_empty_shards, test_backward_with_empty_shards, test_ring_bytes
"""

import solution
from solution import *  # noqa: F403


def _ring(rank, bounds, needs):
    following = rank + 1 if rank + 2 < len(bounds) else None
    return (rank - 1 if rank else None), following, (needs[following][1:] if following is not None else [])


solution._ring = _ring
