"""The clock stops where nothing can move, and reports what was done so far.

fails: test_clock_refuses
"""

import solution
from solution import *  # noqa: F403


def clock(plan, forward, backward, weight=None, hop=0.0):
    try:
        return solution.clock(plan, forward, backward, weight, hop)
    except ValueError:
        starts = [[0.0] * len(passes) for passes in plan]
        return {"makespan": 0.0, "starts": starts, "in_flight": [1] * len(plan)}
