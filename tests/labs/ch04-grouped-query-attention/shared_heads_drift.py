"""Adds nothing up between the holders of a key-value head.

fails: test_gradients_of_the_parameters_equal_dense, test_attention_sends_no_more_than_needed
"""

import solution
from solution import *  # noqa: F403


class Alone:
    """A communicator whose groups don't communicate."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def group(self, ranks):
        return self

    def all_reduce(self, x):
        return x if x.ndim == 1 else self.comm.all_reduce(x)


def attention_step(comm, part, x, dy, heads, kv_heads, real=solution.attention_step):
    return real(Alone(comm), part, x, dy, heads, kv_heads)
