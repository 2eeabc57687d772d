"""Blocks that nobody reads are skipped, but of the others all rows are sent.

fails: test_forward_moves_only_what_is_read, test_backward_comes_home_along_the_ring, test_ring_bytes
"""

import solution
from solution import *  # noqa: F403
from solution import needed_rows as right_rows


def _whole(bounds, documents, window=None):
    needs = right_rows(bounds, documents, window)
    return [[(s, bounds[s], bounds[s + 1]) for s, _, _ in mine] for mine in needs]


def needed_rows(bounds, documents, window=None):
    """Which keys each rank reads: (source, start, stop), its own first, then back along the ring."""
    return right_rows(bounds, documents, window)


solution.needed_rows = _whole  # what the programs and the prediction use
