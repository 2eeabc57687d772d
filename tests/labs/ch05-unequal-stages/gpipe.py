"""The schedule is GPipe: all forward passes, then all backward passes, whatever the limits say.

fails: test_schedule_is_sound, test_schedule_is_no_slower_than_1f1b, test_schedule_beats_1f1b, test_schedule_with_split_backward
"""

from solution import *  # noqa: F403


def schedule(forward, backward, micro_batches, limits, weight=None, hop=0.0):
    if min(limits) < 1:
        raise ValueError("limits must be 1 or more")
    passes = [(kind, mb) for kind in ("FB" if weight is None else "FBW") for mb in range(micro_batches)]
    return [list(passes) for _ in limits]
