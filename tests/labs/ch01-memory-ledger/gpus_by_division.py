"""Divides what one GPU would need by the memory of one: as if everything were sharded, and GPUs came singly.

fails: test_fewest_gpus
"""

import math

import solution
from solution import *  # noqa: F403


def fewest_gpus(memory, model, rules, convention, batch, sequence, stage, most=4096, per_node=1, **options):
    need = solution.peak_bytes(model, rules, convention, batch, sequence, 1, stage, **options)
    gpus = math.ceil(need / memory)
    return gpus if gpus <= most else None
