"""Lets every bucket start when it is complete, though the one before is still under way.

fails: test_timeline_of_a_case_worked_by_hand, test_timeline_agrees_with_the_simulated_clock
"""

import solution
from solution import *  # noqa: F403


def step_timeline(nbytes, seconds, plan, micro_batches, ranks, alpha, beta):
    computing = micro_batches * sum(seconds)
    ready, clock = {}, (micro_batches - 1) * sum(seconds)
    for i in reversed(range(len(nbytes))):
        clock += seconds[i]
        ready[i] = clock
    total = computing
    for bucket in plan:
        size = sum(nbytes[i] for i in bucket)
        took = 2 * (ranks - 1) * (alpha + size / ranks / beta)
        total = max(total, max(ready[i] for i in bucket) + took)
    return total, total - computing


solution.step_timeline = step_timeline
