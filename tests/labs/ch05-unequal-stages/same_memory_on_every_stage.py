"""The partition counts P micro-batches in flight on every stage, as on the first.

fails: test_partition_within_memory
"""

from solution import *  # noqa: F403


def partition(costs, fixed, saved, stages, micro_batches, memory=None):
    layers, flight = len(costs), min(stages, micro_batches)
    if not 1 <= stages <= layers:
        raise ValueError("stages: too many")
    best = {0: (0, ())}
    for s in range(stages):
        row = {}
        for start, (slowest, sizes) in best.items():
            for end in range(start + 1, layers - (stages - 1 - s) + 1):
                piece = slice(start, end)
                if memory is not None and sum(fixed[piece]) + flight * sum(saved[piece]) > memory:
                    break
                found = max(slowest, sum(costs[piece]))
                if end not in row or found < row[end][0]:
                    row[end] = found, (*sizes, end - start)
        best = row
    if layers not in best:
        raise ValueError("memory: nothing fits")
    return list(best[layers][1])
