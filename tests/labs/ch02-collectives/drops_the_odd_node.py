"""Counts only full nodes, so that the last ranks are left out of the sum.

fails: test_hierarchy_gives_every_rank_the_sum
"""

import solution
from solution import *  # noqa: F403


def hierarchical_all_reduce(comm, x, per_node, real=solution.hierarchical_all_reduce):
    full = comm.size // per_node * per_node
    if not full or comm.rank >= full:
        return x
    return real(comm.group(range(full)), x, per_node)
