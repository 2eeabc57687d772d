"""The quickest plan of all is searched for, and only then it turns out not to fit.

fails: test_best_plan_is_one_and_fits, test_best_plan_beats_the_rule_of_thumb, test_best_plan_is_near_the_optimum, test_nothing_fits
"""

from solution import *  # noqa: F403
from solution import _all_plans, step_seconds


def best_plan(job, cluster):
    plans = _all_plans(job, {**cluster, "memory": 1e18})
    return min(plans, key=lambda plan: step_seconds(job, cluster, plan), default=None)
