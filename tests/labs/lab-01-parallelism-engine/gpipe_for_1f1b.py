"""Runs all forwards, then all backwards: GPipe, with the same bubble and more memory.

fails: test_schedule_holds_few_activations
"""

from solution import *  # noqa: F403


def pipeline_schedule_1f1b(stages, microbatches):
    if stages < 1 or microbatches < 1:
        raise ValueError("stages and microbatches must be 1 or more")
    p, m = stages, microbatches
    total = 2 * (m + p - 1)
    rows = [["."] * total for _ in range(p)]
    for stage in range(p):
        for k in range(m):
            rows[stage][stage + k] = f"F{k}"
            rows[stage][m + p - 1 + (p - 1 - stage) + k] = f"B{k}"
    return {"useful_steps": 2 * m, "bubble_steps": 2 * (p - 1), "total_steps": total, "rows": rows}
