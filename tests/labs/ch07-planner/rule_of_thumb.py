"""The plan is the rule of thumb: least model parallelism that fits, one sequence a micro-batch.

fails: test_best_plan_beats_the_rule_of_thumb, test_best_plan_is_near_the_optimum
"""

from solution import *  # noqa: F403
from solution import _all_plans


def best_plan(job, cluster):
    plans = [p for p in _all_plans(job, cluster) if p["micro_batch"] == 1 and p["order"] == "tp-pp-dp"]
    least = min((p["tp"] * p["pp"] for p in plans), default=None)
    return next(
        (p for p in plans if p["tp"] * p["pp"] == least and not p["recompute"]), plans[0] if plans else None
    )
