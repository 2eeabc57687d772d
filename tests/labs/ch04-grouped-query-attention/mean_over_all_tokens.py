"""Divides by all tokens, ignored ones too.

fails: test_ignored_tokens_do_not_count, test_gradients_of_the_loss
"""

import solution
from solution import *  # noqa: F403


def vocab_parallel_loss(
    comm, part, hidden, targets, words, z=0.0, ignore=-100, real=solution.vocab_parallel_loss
):
    loss, dhidden, dw = real(comm, part, hidden, targets, words, z, ignore)
    share = (targets != ignore).mean()
    return loss * share, dhidden * share, dw * share
