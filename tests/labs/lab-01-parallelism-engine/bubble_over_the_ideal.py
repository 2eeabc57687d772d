"""Divides the bubble by the ideal time, (P-1)/M, instead of by the makespan; and lets one rank pay for an all-reduce.

fails: test_bubble_fraction, test_cost_is_the_rings, test_cost_of_one_rank_and_of_none
"""

from solution import *  # noqa: F403


def pipeline_bubble_fraction(stages, microbatches):
    if stages < 1 or microbatches < 1:
        raise ValueError("1 or more")
    return (stages - 1) / microbatches


def all_reduce_cost(tensor_bytes, ranks):
    if ranks < 1:
        raise ValueError("ranks must be 1 or more")
    return 2 * (ranks - 1), 2 * tensor_bytes  # "nearly 2S"
