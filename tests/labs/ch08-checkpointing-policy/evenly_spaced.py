"""Inputs are kept at even distances, as for equal layers; the best distance that fits is taken.

fails: test_best_keep_of_short_chains, test_best_keep_of_long_chains, test_least_limit
"""

from solution import *  # noqa: F403
from solution import peak_bytes


def best_keep(sizes, costs, limit):
    layers = len(sizes)
    found = []
    for gap in range(1, layers + 1):
        keep = list(range(0, layers, gap))
        if peak_bytes(sizes, keep) <= limit:
            spent = sum(sum(costs[a : b - 1]) for a, b in zip(keep, keep[1:]))
            found.append((spent, keep))
    if not found:
        raise ValueError("limit: too small")
    return min(found)[1]


def least_limit(sizes):
    return min(peak_bytes(sizes, list(range(0, len(sizes), gap))) for gap in range(1, len(sizes) + 1))
