"""Lets one leader of each node carry everything across the network.

fails: test_hierarchy_spares_the_network
"""

import numpy as np
from solution import *  # noqa: F403
from solution import _ring


def hierarchical_all_reduce(comm, x, per_node):
    leader = comm.rank - comm.rank % per_node
    members = range(leader + 1, min(leader + per_node, comm.size))
    across = comm.group(range(0, comm.size, per_node))
    if comm.rank != leader:
        comm.send(x, leader)
        return comm.recv(leader)
    total = np.array(x)
    for other in members:
        total = total + comm.recv(other)
    total = _ring(across, total)
    for other in members:
        comm.send(total, other)
    return total
