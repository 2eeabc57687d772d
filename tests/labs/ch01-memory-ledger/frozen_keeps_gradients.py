"""Leaves out the optimizer of frozen tensors, but not their gradients and master weights.

fails: test_frozen_tensors_have_only_weights, test_stages_shard_what_zero_says
"""

import solution
from solution import *  # noqa: F403


def ledger(shapes, rules, convention="mixed16", ranks=1, stage=0, real=solution.ledger):
    return real(shapes, [(p, "sgd" if o == "frozen" else o) for p, o in rules], convention, ranks, stage)


solution.ledger = ledger
