"""Each rank moves the biases by the counts of its own tokens.

fails: test_update_bias
"""

import numpy as np
from solution import *  # noqa: F403


def update_bias(comm, bias, chosen, rate):
    """The biases of the experts after a step."""
    counts = np.bincount(chosen[chosen >= 0], minlength=len(bias))
    return bias + rate * np.sign(counts.mean() - counts)
