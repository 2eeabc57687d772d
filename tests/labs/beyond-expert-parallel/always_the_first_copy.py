"""The nearest kind of rank is right, but the first of them serves every token.

fails: test_choose_replicas
"""

CHANGES = [
    (
        "ranks[t, j] = holders[t % len(holders)]",
        "ranks[t, j] = holders[0]",
    ),
]
