"""All choices of all ranks are gathered, those too that are hopeless on their own rank.

fails: test_keep_heaviest_sends_candidates_only
"""

import numpy as np
from solution import *  # noqa: F403


def keep_heaviest(comm, chosen, weight, experts, capacity):
    """Which of this rank's choices are among the `capacity` heaviest of their expert, over all ranks."""
    chosen, weight = np.asarray(chosen), np.asarray(weight)
    token, slot = np.nonzero(chosen >= 0)

    def heaviest(expert, weight):
        """Positions of the heaviest of each expert, in order; earlier ones first among equals."""
        kept = []
        for e in range(experts):
            mine = np.flatnonzero(expert == e)
            kept.append(mine[np.argsort(-weight[mine], kind="stable")[:capacity]])
        return np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)

    rows = np.stack([np.full(len(token), comm.rank), chosen[token, slot], weight[token, slot]], axis=1)
    everybody = comm.all_gather(rows.astype(float))
    final = np.zeros(len(everybody), dtype=bool)
    final[heaviest(everybody[:, 1], everybody[:, 2])] = True
    keep = np.zeros(chosen.shape, dtype=bool)
    keep[token, slot] = final[everybody[:, 0] == comm.rank]
    return keep
