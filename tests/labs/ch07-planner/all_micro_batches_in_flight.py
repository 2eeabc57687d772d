"""Every stage counts the activations of all micro-batches, as GPipe would hold them.

fails: test_memory_of_the_fullest_stage
"""

from solution import *  # noqa: F403
from solution import _stages


def memory_bytes(job, plan):
    """Bytes on a rank of the fullest stage."""
    s, h, b = job["sequence"], job["hidden"], plan["micro_batch"]
    m = job["batch"] // (plan["dp"] * b)
    per_parameter = (
        2 + 2 / (plan["dp"] if plan["zero"] >= 2 else 1) + 12 / (plan["dp"] if plan["zero"] >= 1 else 1)
    )
    most = 0.0
    for i, (layers, n) in enumerate(_stages(job, plan)):
        kept = layers * (2 if plan["recompute"] else 34) * s * b * h / plan["tp"]
        held = n * per_parameter + m * kept
        if plan["recompute"]:
            held += 34 * s * b * h / plan["tp"]
        if i == plan["pp"] - 1:
            held += 6 * s * b * job["vocabulary"] / plan["tp"]
        most = max(most, held)
    return most
