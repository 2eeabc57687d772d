"""The interval is Young's formula, rounded.

fails: test_best_every
"""

import math

from solution import *  # noqa: F403


def best_every(steps, step, save, restart, mtbf):
    return max(1, min(steps, round(math.sqrt(2 * save * mtbf) / step)))
