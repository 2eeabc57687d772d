"""Lets each rank hold one key-value head when there are fewer than ranks: the one of its first query.

fails: test_ranks_hold_the_key_value_heads_that_they_read, test_shards_are_cut_along_the_heads, test_gradients_of_the_parameters_equal_dense, test_attention_sends_no_more_than_needed, test_attention_bytes, test_kv_cache
"""

import solution
from solution import *  # noqa: F403


def head_layout(heads, kv_heads, ranks, real=solution.head_layout):
    layout = real(heads, kv_heads, ranks)
    if ranks > kv_heads:
        layout = [{"q": mine["q"], "kv": (mine["kv"][0], mine["kv"][0] + 1)} for mine in layout]
    return layout


solution.head_layout = head_layout
