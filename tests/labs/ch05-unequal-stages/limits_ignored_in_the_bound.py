"""The lower bound takes the limits for granted: a stage with room for one still works without a pause.

fails: test_lower_bound_with_limits
"""

import solution
from solution import *  # noqa: F403


def lower_bound(forward, backward, micro_batches, hop=0.0, limits=None):
    return solution.lower_bound(forward, backward, micro_batches, hop)
