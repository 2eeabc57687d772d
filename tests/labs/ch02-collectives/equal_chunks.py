"""Cuts equal chunks, whatever the counts say.

fails: test_reduce_scatter_gives_each_rank_its_part_of_the_sum, test_reduce_scatter_sends_all_but_its_own
"""

import solution
from solution import *  # noqa: F403

from manyranks.runtime import chunk_bounds


def reduce_scatter_v(comm, x, counts, real=solution.reduce_scatter_v):
    if len(counts) != comm.size or min(counts) < 0 or sum(counts) != len(x):
        raise ValueError("counts don't fit")
    bounds = chunk_bounds(len(x), comm.size)
    return real(comm, x, [b - a for a, b in zip(bounds, bounds[1:])])
