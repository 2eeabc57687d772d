"""The partition gives every stage as many layers as the next, whatever they cost.

fails: test_partition_of_layers, test_partition_within_memory, test_partition_refuses
"""

from solution import *  # noqa: F403


def partition(costs, fixed, saved, stages, micro_batches, memory=None):
    base, extra = divmod(len(costs), stages)
    return [base + (s < extra) for s in range(stages)]
