"""Each rank keeps the heaviest of its own choices, as if every rank had the whole capacity.

fails: test_keep_heaviest
"""

import numpy as np
from solution import *  # noqa: F403


def keep_heaviest(comm, chosen, weight, experts, capacity):
    """Which of this rank's choices are kept."""
    keep = np.zeros(chosen.shape, dtype=bool)
    for e in range(experts):
        token, slot = np.nonzero(chosen == e)
        first = np.argsort(-weight[token, slot], kind="stable")[:capacity]
        keep[token[first], slot[first]] = True
    return keep
