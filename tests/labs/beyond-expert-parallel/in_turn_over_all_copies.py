"""Tokens go to the copies in turn, wherever these are.

fails: test_choose_replicas
"""

import numpy as np
from solution import *  # noqa: F403


def choose_replicas(chosen, placement, rank, node):
    """Which rank serves each choice."""
    ranks = np.full(np.shape(chosen), -1, dtype=np.int64)
    for (t, j), expert in np.ndenumerate(chosen):
        holders = [r for r, mine in enumerate(placement) if expert in mine]
        if expert >= 0:
            ranks[t, j] = holders[t % len(holders)]
    return ranks
