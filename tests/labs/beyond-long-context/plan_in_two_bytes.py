"""The plan takes two bytes an element, whatever it is told.

fails: test_smallest_hidden_shard
"""

from solution import *  # noqa: F403
from solution import smallest_hidden_shard as with_itemsize


def smallest_hidden_shard(window, heads, kv_heads, head_size, flops, bandwidth, latency=0.0, itemsize=2):
    """The fewest tokens a rank can have so that each transfer is hidden."""
    return with_itemsize(window, heads, kv_heads, head_size, flops, bandwidth, latency)
