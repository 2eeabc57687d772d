"""The next rank is the next number, whether it has tokens or not.

fails: test_forward_moves_only_what_is_read, test_forward_equals_dense, test_forward_with_large_scores,
  test_gradients_of_keys_and_values, test_gradient_of_the_queries, test_backward_comes_home_along_the_ring, test_ring_bytes
"""

import solution
from solution import *  # noqa: F403


def _ring(rank, bounds, needs):
    following = rank + 1 if rank + 2 < len(bounds) else None
    return (rank - 1 if rank else None), following, (needs[following][1:] if following is not None else [])


solution._ring = _ring
