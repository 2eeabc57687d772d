"""The plan sends keys and values for each query head.

fails: test_smallest_hidden_shard
"""

from solution import *  # noqa: F403
from solution import smallest_hidden_shard as grouped


def smallest_hidden_shard(window, heads, kv_heads, head_size, flops, bandwidth, latency=0.0, itemsize=2):
    """The fewest tokens a rank can have."""
    return grouped(window, heads, heads, head_size, flops, bandwidth, latency, itemsize)
