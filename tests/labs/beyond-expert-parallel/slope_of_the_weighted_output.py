"""A choice's slope is taken from the output after its weight.

fails: test_gradients_of_tokens_and_weights
"""

CHANGES = [
    (
        "slopes[mine] = (dys[rows] * (inner[e] @ w2)).sum(axis=1)",
        "slopes[mine] = second.notes[mine, 1] * (dys[rows] * (inner[e] @ w2)).sum(axis=1)",
    ),
]
