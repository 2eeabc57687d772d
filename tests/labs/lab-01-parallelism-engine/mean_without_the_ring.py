"""Averages with NumPy and never communicates.

fails: test_average_goes_over_the_ring
"""

import numpy as np
from solution import *  # noqa: F403


def data_parallel_gradient_average(gradients, send=None):
    return [np.mean(gradients, axis=0)] * len(gradients)
