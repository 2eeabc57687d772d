"""Adds the z-loss to the loss and forgets it in the gradient.

fails: test_gradients_of_the_loss
"""

import solution
from solution import *  # noqa: F403


def vocab_parallel_loss(
    comm, part, hidden, targets, words, z=0.0, ignore=-100, real=solution.vocab_parallel_loss
):
    loss, dhidden, dw = real(comm, part, hidden, targets, words, z, ignore)
    if z:
        _, dhidden, dw = real(comm, part, hidden, targets, words, 0.0, ignore)
    return loss, dhidden, dw
