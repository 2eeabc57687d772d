"""1F1B, rightly cut to the limits, and no search for anything better.

fails: test_schedule_beats_1f1b, test_schedule_with_split_backward
"""

from solution import *  # noqa: F403
from solution import _warmed_up


def schedule(forward, backward, micro_batches, limits, weight=None, hop=0.0):
    if min(limits) < 1:
        raise ValueError("limits must be 1 or more")
    warmup = []
    for s in range(len(limits)):
        ahead = min(len(limits) - 1 - s, limits[s] - 1, micro_batches)
        warmup.append(min(ahead, *warmup) if warmup else ahead)
    return _warmed_up(micro_batches, warmup, weight)
