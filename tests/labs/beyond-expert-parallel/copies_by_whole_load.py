"""The next copy goes to the expert with the largest load, however many copies share it already.

fails: test_replicas
"""

from solution import *  # noqa: F403


def replicas(loads, slots, most):
    """How often each expert is held."""
    if not len(loads) <= slots <= len(loads) * most:
        raise ValueError(f"slots must be {len(loads)} to {len(loads) * most}, got {slots}")
    copies = [1] * len(loads)
    for _ in range(slots - len(loads)):
        open_ones = [e for e in range(len(loads)) if copies[e] < most]
        copies[max(open_ones, key=lambda e: loads[e])] += 1
    return copies
