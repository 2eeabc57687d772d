"""The peak counts all kept inputs with the largest segment, also those that are dropped by then.

fails: test_peak_bytes
"""

from solution import *  # noqa: F403


def peak_bytes(sizes, keep):
    inside = max(sum(sizes[a + 1 : b]) for a, b in zip(keep, [*keep[1:], len(sizes)]))
    return sum(sizes[k] for k in keep) + inside
