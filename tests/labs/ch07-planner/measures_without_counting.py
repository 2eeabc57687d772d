"""Every plan is measured, whatever the budget.

fails: test_tuned_plan_on_a_machine_that_is_not_its_data_sheet
"""

from solution import *  # noqa: F403
from solution import _all_plans


def tuned_plan(job, cluster, measure, budget):
    seen = [(measure(plan), i, plan) for i, plan in enumerate(_all_plans(job, cluster))]
    return min(row for row in seen if row[0] is not None)[2]
