"""The gradients of an expert's copies are averaged.

fails: test_gradients_of_experts
"""

CHANGES = [
    (
        "group.all_reduce(g)",
        'group.all_reduce(g, op="mean")',
    ),
]
