"""The cut is the best there is, and whether it fits is looked at only for all ranks together.

fails: test_split_within_memory
"""

from solution import *  # noqa: F403
from solution import balanced_split as unlimited


def balanced_split(documents, ranks, window=None, most=None):
    """Offsets of contiguous shards whose largest work is as small as it can be."""
    if most is not None and most * ranks < sum(documents):
        raise ValueError(f"most: {ranks} ranks of at most {most} tokens have no room for {sum(documents)}")
    return unlimited(documents, ranks, window)
