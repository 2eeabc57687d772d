"""Forgets to divide: the sum of the gradients, not their mean.

fails: test_average_is_the_serial_mean, test_average_is_the_gradient_of_one_big_batch, test_average_goes_over_the_ring
"""

import numpy as np
from solution import *  # noqa: F403
from solution import ring_all_reduce


def data_parallel_gradient_average(gradients, send=None):
    shape = np.shape(gradients[0])
    return [s.reshape(shape) for s in ring_all_reduce([np.reshape(g, -1) for g in gradients], send)]
