"""Lets padded columns take part in the softmax.

fails: test_loss_equals_dense, test_ignored_tokens_do_not_count, test_gradients_of_the_loss
"""

import solution
from solution import *  # noqa: F403


def vocab_parallel_loss(
    comm, part, hidden, targets, words, z=0.0, ignore=-100, real=solution.vocab_parallel_loss
):
    return real(comm, part, hidden, targets, part.shape[1] * comm.size, z, ignore)
