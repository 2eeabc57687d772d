"""Every block goes to the end of the ring, as in plain ring attention; only the work on unread ones is left out.

fails: test_forward_moves_only_what_is_read, test_forward_overlaps, test_backward_comes_home_along_the_ring, test_ring_bytes
"""

import solution
from solution import *  # noqa: F403
from solution import needed_rows as right_rows


def _all_before(bounds, documents, window=None):
    full = [r for r in range(len(bounds) - 1) if bounds[r] < bounds[r + 1]]
    return [
        [(s, bounds[s], bounds[s + 1]) for s in reversed(full) if s <= r] if r in full else []
        for r in range(len(bounds) - 1)
    ]


def needed_rows(bounds, documents, window=None):
    """Which keys each rank reads: (source, start, stop), its own first, then back along the ring."""
    return right_rows(bounds, documents, window)


solution.needed_rows = _all_before  # what the programs and the prediction use
