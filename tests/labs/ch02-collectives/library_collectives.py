"""Calls the communicator's own all-reduce and all-gather.

fails: test_reduce_scatter_gives_each_rank_its_part_of_the_sum, test_reduce_scatter_sends_all_but_its_own, test_all_gather_puts_the_parts_together, test_all_gather_is_a_ring, test_counts_that_do_not_fit_are_refused
"""

import numpy as np
from solution import *  # noqa: F403


def reduce_scatter_v(comm, x, counts):
    ends = np.cumsum(counts)
    return comm.all_reduce(x)[ends[comm.rank] - counts[comm.rank] : ends[comm.rank]]


def all_gather_v(comm, part, counts):
    return comm.all_gather(part)
