"""The work of a block is taken to be all of its pairs, masked ones too.

fails: test_forward_overlaps
"""

CHANGES = [
    (
        "comm.compute(flops=4 * int(seen.sum()) * heads * d)",
        "comm.compute(flops=4 * seen.size * heads * d)",
    ),
]
