"""Starts with its own chunk, so that the sums end one rank away from where they belong.

fails: test_reduce_scatter_gives_each_rank_its_part_of_the_sum, test_reduce_scatter_sends_all_but_its_own
"""

import numpy as np
from solution import *  # noqa: F403


def reduce_scatter_v(comm, x, counts):
    n, rank = comm.size, comm.rank
    if len(counts) != n or min(counts) < 0 or sum(counts) != len(x):
        raise ValueError("counts don't fit")
    chunks = np.split(x.copy(), np.cumsum(counts)[:-1])
    for k in range(n - 1):
        going = comm.isend(chunks[(rank - k) % n], (rank + 1) % n)
        chunks[(rank - k - 1) % n] = chunks[(rank - k - 1) % n] + comm.recv((rank - 1) % n)
        going.wait()
    return chunks[(rank + 1) % n]
