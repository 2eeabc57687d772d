"""Adds bo to every rank's term before they are summed.

fails: test_attention_equals_dense
"""

import solution
from solution import *  # noqa: F403


def attention_step(comm, part, x, dy, heads, kv_heads, real=solution.attention_step):
    y, dx, grads = real(comm, part, x, dy, heads, kv_heads)
    if "bo" in part:
        y = y + (comm.size - 1) * part["bo"]  # what comes out if each rank's term has it
    return y, dx, grads
