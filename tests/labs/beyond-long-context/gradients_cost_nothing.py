"""The backward program is taken to send what the forward program sends.

fails: test_ring_bytes
"""

from solution import *  # noqa: F403
from solution import ring_bytes as forward_bytes


def ring_bytes(bounds, documents, kv_heads, head_size, window=None, itemsize=2, backward=False):
    """What each rank sends."""
    return forward_bytes(bounds, documents, kv_heads, head_size, window, itemsize)
