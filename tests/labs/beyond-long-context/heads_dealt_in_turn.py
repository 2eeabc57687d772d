"""Query head i reads key-value head i % c, not the head of its group.

fails: test_forward_equals_dense, test_forward_with_large_scores, test_gradient_of_the_queries,
  test_gradients_of_keys_and_values, test_forward_with_empty_shards, test_backward_with_empty_shards
"""

CHANGES = [
    (
        "q = q.reshape(tokens, kv_heads, heads // kv_heads, d) / np.sqrt(d)",
        "q = q.reshape(tokens, heads // kv_heads, kv_heads, d).swapaxes(1, 2) / np.sqrt(d)",
    ),
    (
        '"out": out.reshape(tokens, heads, d), "lse": lse.reshape(tokens, heads)',
        '"out": out.swapaxes(1, 2).reshape(tokens, heads, d), "lse": lse.swapaxes(1, 2).reshape(tokens, heads)',
    ),
    (
        "q, dout, out = q.reshape(shape), dout.reshape(shape), out.reshape(shape)",
        "q, dout, out = (x.reshape(tokens, -1, kv_heads, d).swapaxes(1, 2) for x in (q, dout, out))",
    ),
    (
        "lse, delta = lse.reshape(shape[:3]),",
        "lse, delta = lse.reshape(tokens, -1, kv_heads).swapaxes(1, 2),",
    ),
    (
        '"dq": dq.reshape(tokens, heads, d)',
        '"dq": dq.swapaxes(1, 2).reshape(tokens, heads, d)',
    ),
]
