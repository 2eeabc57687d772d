"""Shards the gradients at stage 1 already, and the weights at stage 2.

fails: test_zero_ladder, test_zero_shards_what_the_stage_says
"""

from solution import *  # noqa: F403


def zero_memory_per_gpu(parameters, ranks, stage):
    if stage not in (0, 1, 2, 3) or ranks < 1:
        raise ValueError("stage must be 0 to 3, ranks 1 or more")
    whole = [16, 2, 0, 0][stage]
    return parameters * (whole + (16 - whole) / ranks)
