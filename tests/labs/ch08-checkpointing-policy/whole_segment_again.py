"""Every layer of a segment is computed again, also the last one, whose output is kept.

fails: test_chain_computes_again_what_it_must
"""

from solution import *  # noqa: F403
from solution import _segments


def run_chain(forward, backward, x, dy, keep, layers, put, get, drop):
    """Forward and backward through a chain that keeps some inputs and computes the others again: (y, dx)."""
    segments = _segments(keep, layers)
    last = keep[-1]
    for i in range(layers):
        if i in keep or i > last:
            put(i, x)
        x = forward(i, x)
    y = x
    for start, end in reversed(segments):
        if start != last:
            x = get(start)
            for i in range(start, end - 1):
                x = forward(i, x)
                put(i + 1, x)
            forward(end - 1, x)
        for i in range(end - 1, start - 1, -1):
            dy = backward(i, get(i), dy)
            drop(i)
    return y, dy
