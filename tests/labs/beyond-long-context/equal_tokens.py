"""Every rank gets the same number of tokens, whatever they read.

fails: test_split_balances_the_work, test_split_within_memory
"""

from solution import *  # noqa: F403


def balanced_split(documents, ranks, window=None, most=None):
    """Offsets of contiguous shards."""
    tokens = sum(documents)
    if most is not None and most * ranks < tokens:
        raise ValueError(f"most: {ranks} ranks of at most {most} tokens have no room for {tokens}")
    return [r * (tokens // ranks) + min(r, tokens % ranks) for r in range(ranks + 1)]
