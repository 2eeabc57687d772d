"""All-reduces the key-value gradients over all ranks, padded to the whole layer's heads.

fails: test_attention_sends_no_more_than_needed
"""

import numpy as np
import solution
from solution import *  # noqa: F403


def attention_step(comm, part, x, dy, heads, kv_heads, real=solution.attention_step):
    class Padded:
        def __getattr__(self, name):
            return getattr(comm, name)

        def group(self, holders):
            return type("Group", (), {"all_reduce": lambda _, x: x})()

    y, dx, grads = real(Padded(), part, x, dy, heads, kv_heads)
    first, stop = solution.head_layout(heads, kv_heads, comm.size)[comm.rank]["kv"]
    for name, axis in solution.KEY_VALUE.items():
        if name in part:
            shape = list(part[name].shape)
            shape[axis] = kv_heads
            whole, at = np.zeros(shape), (slice(None),) * axis + (slice(first, stop),)
            whole[at] = grads[name]
            grads[name] = comm.all_reduce(whole)[at]
    return y, dx, grads
