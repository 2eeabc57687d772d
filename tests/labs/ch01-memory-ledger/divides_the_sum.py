"""Divides the whole by the ranks, instead of rounding each tensor up.

fails: test_the_fullest_rank_counts, test_adafactors_factors_stay_whole
"""

import solution
from solution import *  # noqa: F403


def ledger(shapes, rules, convention="mixed16", ranks=1, stage=0, real=solution.ledger):
    terms = real(shapes, rules, convention, ranks, stage)  # its checks
    terms = real(shapes, rules, convention)
    needed = {"weight": 3, "gradient": 2, "master": 1, "optimizer": 1}
    return {term: size / ranks if stage >= needed[term] else size for term, size in terms.items()}


solution.ledger = ledger
