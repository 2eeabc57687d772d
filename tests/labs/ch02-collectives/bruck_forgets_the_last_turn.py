"""Leaves the rows in the order of the distance that they came, instead of the rank that they came from.

fails: test_bruck_delivers_every_row
"""

import numpy as np
from solution import *  # noqa: F403


def bruck_all_to_all(comm, blocks):
    n, rank = comm.size, comm.rank
    mine, bit = np.roll(blocks, -rank, axis=0), 1
    while bit < n:
        rows = [i for i in range(n) if i & bit]
        going = comm.isend(mine[rows], (rank + bit) % n)
        mine[rows] = comm.recv((rank - bit) % n)
        going.wait()
        bit *= 2
    return np.roll(mine, rank, axis=0)
