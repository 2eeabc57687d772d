"""A block's work is taken to be all pairs of a shard's tokens, as in the paper's rule for one block.

fails: test_smallest_hidden_shard
"""

from solution import *  # noqa: F403


def smallest_hidden_shard(window, heads, kv_heads, head_size, flops, bandwidth, latency=0.0, itemsize=2):
    """The fewest tokens a rank can have."""
    tokens = 1
    while True:
        seconds = latency + 2 * min(tokens, window - 1) * kv_heads * head_size * itemsize / bandwidth
        if seconds <= 4 * heads * head_size * tokens**2 / flops or window == 1:
            return tokens
        tokens += 1
