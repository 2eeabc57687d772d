"""Starting from all inputs kept, the largest that still has to go is dropped until the limit is met.

fails: test_best_keep_of_short_chains, test_best_keep_of_long_chains
"""

from solution import *  # noqa: F403
from solution import peak_bytes


def best_keep(sizes, costs, limit):
    keep = list(range(len(sizes)))
    while peak_bytes(sizes, keep) > limit:
        if len(keep) == 1:
            raise ValueError("limit: too small")
        keep.remove(max(keep[1:], key=lambda k: sizes[k]))
    return keep
