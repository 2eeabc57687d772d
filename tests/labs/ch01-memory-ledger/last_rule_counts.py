"""Lets the last rule that fits decide.

fails: test_the_first_rule_that_fits_counts, test_mixed_optimizers_add_up, test_frozen_tensors_have_only_weights, test_stages_shard_what_zero_says
"""

import solution
from solution import *  # noqa: F403


def assign_optimizers(shapes, rules, real=solution.assign_optimizers):
    return real(shapes, rules[::-1])


solution.assign_optimizers = assign_optimizers
