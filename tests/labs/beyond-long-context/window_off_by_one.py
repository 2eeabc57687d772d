"""A token reads the `window` tokens before it, and itself as well.

fails: test_split_balances_the_work, test_split_within_memory, test_needed_rows, test_forward_equals_dense,
  test_forward_with_large_scores, test_forward_moves_only_what_is_read, test_forward_overlaps,
  test_gradient_of_the_queries, test_gradients_of_keys_and_values, test_backward_comes_home_along_the_ring,
  test_ring_bytes, test_forward_with_empty_shards, test_backward_with_empty_shards
"""

CHANGES = [
    (
        "keys = np.minimum(keys, window)",
        "keys = np.minimum(keys, window + 1)",
    ),
    (
        "low = max(low, first - window + 1)",
        "low = max(low, first - window)",
    ),
    (
        "seen & (i - j < window)",
        "seen & (i - j <= window)",
    ),
]
