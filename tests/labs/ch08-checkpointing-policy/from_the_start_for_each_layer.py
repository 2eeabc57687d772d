"""Each layer's input is computed again from the kept one when its turn comes: little memory, many calls.

fails: test_chain_computes_again_what_it_must, test_chain_holds_no_more_than_it_must
"""

from solution import *  # noqa: F403


def run_chain(forward, backward, x, dy, keep, layers, put, get, drop):
    for i in range(layers):
        if i in keep:
            put(i, x)
        x = forward(i, x)
    y = x
    for i in reversed(range(layers)):
        start = max(k for k in keep if k <= i)
        x = get(start)
        for j in range(start, i):
            x = forward(j, x)
        dy = backward(i, x, dy)
        if i in keep:
            drop(i)
    return y, dy
