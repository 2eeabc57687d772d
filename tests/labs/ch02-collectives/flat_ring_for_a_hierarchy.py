"""Ignores the nodes: a ring through all ranks.

fails: test_hierarchy_spares_the_network
"""

from solution import *  # noqa: F403
from solution import _ring


def hierarchical_all_reduce(comm, x, per_node):
    return _ring(comm, x)
