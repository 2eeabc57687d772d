"""Divides the cache of all key-value heads by the number of ranks.

fails: test_kv_cache
"""

from solution import *  # noqa: F403


def kv_cache_bytes(batch, sequence, layers, heads, kv_heads, head_size, ranks, itemsize=2):
    return [2 * layers * batch * sequence * kv_heads * head_size * itemsize / ranks] * ranks
