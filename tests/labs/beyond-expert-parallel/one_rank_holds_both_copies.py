"""The hottest copy goes to the emptiest rank with a free slot, even if that rank holds the expert already.

fails: test_placement_is_sound, test_placement_is_balanced
"""

from solution import *  # noqa: F403


def place(loads, copies, ranks):
    """The experts of each rank."""
    if sum(copies) % ranks or max(copies) > ranks:
        raise ValueError("copies don't fit")
    share = [load / n for load, n in zip(loads, copies)]
    held = [[] for _ in range(ranks)]
    for e in sorted(range(len(loads)), key=lambda e: -share[e]):
        for _ in range(copies[e]):
            free = [mine for mine in held if len(mine) < sum(copies) // ranks]
            min(free, key=lambda mine: sum(share[i] for i in mine)).append(e)
    return held
