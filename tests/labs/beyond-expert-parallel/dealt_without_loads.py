"""Copies are dealt out in the order of the experts' numbers.

fails: test_placement_is_balanced
"""

from solution import *  # noqa: F403


def place(loads, copies, ranks):
    """The experts of each rank."""
    if sum(copies) % ranks or max(copies) > ranks:
        raise ValueError("copies don't fit")
    slots = [e for e, n in enumerate(copies) for _ in range(n)]
    return [slots[r::ranks] for r in range(ranks)]
