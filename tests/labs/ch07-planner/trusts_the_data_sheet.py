"""The sixteen plans that the data sheet likes best are measured, and nothing is learnt from them.

fails: test_tuned_plan_on_a_machine_that_is_not_its_data_sheet
"""

from solution import *  # noqa: F403
from solution import _all_plans, step_seconds


def tuned_plan(job, cluster, measure, budget):
    plans = sorted(_all_plans(job, cluster), key=lambda plan: step_seconds(job, cluster, plan))
    seen = [(measure(plan), i, plan) for i, plan in enumerate(plans[:budget])]
    seen = [row for row in seen if row[0] is not None]
    return min(seen)[2] if seen else None
