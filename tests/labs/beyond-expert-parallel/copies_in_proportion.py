"""Copies are the load's part of the slots, rounded; what is left over goes to the first experts.

fails: test_replicas
"""

from solution import *  # noqa: F403


def replicas(loads, slots, most):
    """How often each expert is held."""
    if not len(loads) <= slots <= len(loads) * most:
        raise ValueError(f"slots must be {len(loads)} to {len(loads) * most}, got {slots}")
    copies = [min(most, max(1, round(slots * load / (sum(loads) or 1)))) for load in loads]
    e = 0
    while sum(copies) != slots:
        step = 1 if sum(copies) < slots else -1
        if 1 <= copies[e] + step <= most:
            copies[e] += step
        e = (e + 1) % len(loads)
    return copies
