"""Subtracts each rank's own largest logit, and adds up exponentials that don't belong together.

fails: test_loss_equals_dense, test_ignored_tokens_do_not_count, test_gradients_of_the_loss
"""

import solution
from solution import *  # noqa: F403


def vocab_parallel_loss(
    comm, part, hidden, targets, words, z=0.0, ignore=-100, real=solution.vocab_parallel_loss
):
    class Own:
        def __getattr__(self, name):
            return getattr(comm, name)

        def all_reduce(self, x, op="sum"):
            return x if op == "max" else comm.all_reduce(x)

    return real(Own(), part, hidden, targets, words, z, ignore)
