"""1F1B with each stage's warm-up cut to its own limit: a later stage then wants more than an earlier one can send.

fails: test_schedule_is_sound, test_schedule_is_no_slower_than_1f1b, test_schedule_beats_1f1b, test_schedule_with_split_backward
"""

from solution import *  # noqa: F403
from solution import _warmed_up


def schedule(forward, backward, micro_batches, limits, weight=None, hop=0.0):
    if min(limits) < 1:
        raise ValueError("limits must be 1 or more")
    stages = len(limits)
    warmup = [min(stages - 1 - s, limits[s] - 1, micro_batches) for s in range(stages)]
    return _warmed_up(micro_batches, warmup, weight)
