"""The last axis of the order runs fastest, as in a C array.

fails: test_coordinates
"""

import math

from solution import *  # noqa: F403
from solution import _axes


def coordinates(rank, sizes, order):
    """The rank's coordinate on each axis; the first axis of `order` runs fastest."""
    axes = _axes(sizes, order)
    if not 0 <= rank < math.prod(sizes.values()):
        raise ValueError(f"rank must be from 0 to {math.prod(sizes.values()) - 1}, got {rank}")
    found = {}
    for axis in reversed(axes):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found
