"""The capacity goes to the first choices of an expert, in the order of ranks and tokens.

fails: test_keep_heaviest
"""

import numpy as np
from solution import *  # noqa: F403
from solution import keep_heaviest as by_weight


def keep_heaviest(comm, chosen, weight, experts, capacity):
    """Which of this rank's choices are kept."""
    return by_weight(comm, chosen, np.zeros_like(weight), experts, capacity)
