"""The chain puts every input and computes nothing again.

fails: test_chain_computes_again_what_it_must, test_chain_holds_no_more_than_it_must
"""

from solution import *  # noqa: F403


def run_chain(forward, backward, x, dy, keep, layers, put, get, drop):
    for i in range(layers):
        put(i, x)
        x = forward(i, x)
    for i in reversed(range(layers)):
        dy = backward(i, get(i), dy)
        drop(i)
    return x, dy
