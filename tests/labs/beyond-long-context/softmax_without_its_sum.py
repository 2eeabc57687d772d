"""The gradient of a score is p * dp: that probabilities sum to 1 is forgotten.

fails: test_gradient_of_the_queries, test_gradients_of_keys_and_values, test_backward_with_empty_shards
"""

CHANGES = [
    (
        'ds = p * (np.einsum("ikgd,jkd->ikgj", dout, kv[1]) - delta[..., None]) / np.sqrt(d)',
        'ds = p * np.einsum("ikgd,jkd->ikgj", dout, kv[1]) / np.sqrt(d)',
    ),
]
