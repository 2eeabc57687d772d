"""Choices are counted, not the ranks and nodes that a token visits.

fails: test_count_rows
"""

from solution import *  # noqa: F403


def count_rows(ranks, rank, node):
    """Rows that travel between nodes and inside nodes."""
    across = inside = 0
    for row in ranks:
        for r in row:
            if r >= 0:
                across += r // node != rank // node
                inside += r != r // node * node + rank % node
    return {"across": across, "inside": inside}
