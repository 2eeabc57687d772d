"""A token reads the `window` tokens before it, and itself as well.

fails: test_split_balances_the_work, test_split_within_memory, test_needed_rows, test_forward_equals_dense,
  test_forward_with_large_scores, test_forward_moves_only_what_is_read, test_forward_overlaps,
  test_gradient_of_the_queries, test_gradients_of_keys_and_values, test_backward_comes_home_along_the_ring,
  test_ring_bytes, test_forward_with_empty_shards, test_backward_with_empty_shards
"""

import solution
from solution import *  # noqa: F403


def _wider(f, at):
    def wide(*args, **options):
        args = list(args)
        if len(args) > at and args[at] is not None:
            args[at] += 1
        elif options.get("window") is not None:
            options["window"] += 1
        return f(*args, **options)

    return wide


solution._mask = _wider(solution._mask, 5)
solution.needed_rows = needed_rows = _wider(solution.needed_rows, 2)
balanced_split = _wider(solution.balanced_split, 2)
