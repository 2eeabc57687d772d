"""Biases move by how much an expert's tokens differ from the average, not by one step.

fails: test_update_bias
"""

import numpy as np
from solution import *  # noqa: F403


def update_bias(comm, bias, chosen, rate):
    """The biases of the experts after a step."""
    counts = comm.all_reduce(np.bincount(chosen[chosen >= 0], minlength=len(bias)).astype(float))
    return bias + rate * (counts.mean() - counts) / max(counts.mean(), 1)
