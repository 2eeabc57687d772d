"""The dynamic programme remembers only the cheapest way to each input, not what it keeps.

fails: test_best_keep_of_short_chains, test_best_keep_of_long_chains
"""

import itertools
import math

from solution import *  # noqa: F403


def best_keep(sizes, costs, limit):
    """The inputs to keep so that the peak is within the limit and as little as can be is computed again."""
    layers = len(sizes)
    size, cost = [0, *itertools.accumulate(sizes)], [0, *itertools.accumulate(costs)]
    # fronts[k]: (bytes kept up to and with input k, recomputation so far, the kept inputs), none of them beaten
    fronts = [[] for _ in range(layers)]
    fronts[0] = [(sizes[0], 0, (0,))]
    best = None
    for k in range(layers):
        front, least = [], math.inf
        for kept, spent, keep in sorted(fronts[k]):
            if spent < least:
                front = [(kept, spent, keep)]
                least = spent
        for kept, spent, keep in front:
            if kept + size[layers] - size[k + 1] <= limit and (best is None or spent < best[0]):
                best = spent, keep
            for n in range(k + 1, layers):
                if kept + size[n] - size[k + 1] > limit:
                    break
                fronts[n].append((kept + sizes[n], spent + cost[n - 1] - cost[k], (*keep, n)))
    if best is None:
        raise ValueError(f"limit: nothing that can be kept stays within {limit} bytes")
    return list(best[1])
