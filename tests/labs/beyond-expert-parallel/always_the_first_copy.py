"""The nearest kind of rank is right, but the first of them serves every token.

fails: test_choose_replicas
"""

import numpy as np
from solution import *  # noqa: F403


def choose_replicas(chosen, placement, rank, node):
    """Which rank serves each choice."""
    ranks = np.full(np.shape(chosen), -1, dtype=np.int64)
    for (t, j), expert in np.ndenumerate(chosen):
        holders = [r for r, mine in enumerate(placement) if expert in mine]
        near = [r for r in holders if r // node == rank // node]
        if expert >= 0:
            ranks[t, j] = rank if rank in holders else (near or holders)[0]
    return ranks
