"""A choice of -1 counts as one of the last expert, and takes its room.

fails: test_keep_heaviest
"""

import numpy as np
from solution import *  # noqa: F403
from solution import keep_heaviest as without_drops


def keep_heaviest(comm, chosen, weight, experts, capacity):
    """Which of this rank's choices are kept."""
    return without_drops(comm, np.asarray(chosen) % experts, weight, experts, capacity)
