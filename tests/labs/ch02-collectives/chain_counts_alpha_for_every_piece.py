"""Adds a latency for every piece, as if each waited for the one before to arrive.

fails: test_chain_seconds
"""

import solution
from solution import *  # noqa: F403


def chain_seconds(size, ranks, pieces, alpha, beta):
    if pieces < 1:
        raise ValueError("pieces must be 1 or more")
    return 0.0 if ranks == 1 else (ranks + pieces - 2) * (alpha + size / pieces / beta)


solution.chain_seconds = chain_seconds
