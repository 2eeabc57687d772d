"""Numerators and sums are of exp(score) as it is, since no maximum is needed to be exact.

fails: test_forward_with_large_scores
"""

CHANGES = [
    (
        "higher = np.maximum(top, scores.max(axis=-1))",
        "higher = np.zeros_like(top)",
    ),
]
