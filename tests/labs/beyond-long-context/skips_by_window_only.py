"""The window says how far back a rank reads; that a document may begin in between is left to the mask.

fails: test_needed_rows, test_forward_moves_only_what_is_read, test_backward_comes_home_along_the_ring, test_ring_bytes
"""

import solution
from solution import *  # noqa: F403


def needed_rows(bounds, documents, window=None):
    """Which keys each rank reads: (source, start, stop), its own first, then back along the ring."""
    needs = []
    for rank in range(len(bounds) - 1):
        first, mine = bounds[rank], []
        if bounds[rank + 1] > first:
            low = 0 if window is None else max(0, first - window + 1)
            for source in range(rank, -1, -1):
                start, stop = max(low, bounds[source]), bounds[source + 1]
                if start < stop:
                    mine.append((source, start, stop))
        needs.append(mine)
    return needs


solution.needed_rows = needed_rows
