"""The peak of stage 2 forgets the fresh gradient, which is whole until it is reduced.

fails: test_peak_bytes
"""

from solution import *  # noqa: F403
from solution import shard_bounds


def peak_bytes(numel, ranks, rank, stage, micro_batches, weight_bytes=2, grad_bytes=4, state_bytes=12):
    """What a rank holds at the worst moment of a step, by kind, and the total."""
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage}")
    bounds = shard_bounds(numel, ranks)
    shard = bounds[rank + 1] - bounds[rank]
    if micro_batches == 1:
        elements = numel + shard
    else:
        elements = 2 * numel if stage == 1 else 2 * shard
    held = {"weights": weight_bytes * numel, "gradients": grad_bytes * elements, "state": state_bytes * shard}
    return {**held, "total": sum(held.values())}
