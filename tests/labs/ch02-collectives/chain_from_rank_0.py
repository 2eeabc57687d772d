"""Takes rank 0 for the head of the chain, whoever the source is.

fails: test_chain_broadcast_reaches_everybody
"""

import numpy as np
from solution import *  # noqa: F403


def chain_broadcast(comm, x, src, pieces):
    if src and comm.rank in (0, src):  # hands it to rank 0 first
        if comm.rank == src:
            comm.send(x, 0)
        else:
            x = comm.recv(src)
    parts, going = [], []
    for i in range(pieces):
        parts.append(comm.recv(comm.rank - 1) if comm.rank else np.array_split(x, pieces)[i])
        if comm.rank < comm.size - 1:
            going.append(comm.isend(parts[i], comm.rank + 1))
    for work in going:
        work.wait()
    return np.concatenate(parts)
