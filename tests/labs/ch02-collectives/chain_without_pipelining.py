"""Collects all pieces before it passes the first one on.

fails: test_chain_is_pipelined
"""

import numpy as np
from solution import *  # noqa: F403


def chain_broadcast(comm, x, src, pieces):
    place = (comm.rank - src) % comm.size
    if place == 0:
        parts = np.array_split(x, pieces)
    else:
        parts = [comm.recv((comm.rank - 1) % comm.size) for _ in range(pieces)]
    if place < comm.size - 1:
        for part in parts:
            comm.send(part, (comm.rank + 1) % comm.size)
    return np.concatenate(parts)
