"""Each copy of an expert keeps the gradient of the tokens that it has seen.

fails: test_gradients_of_experts, test_backward_sends_no_more
"""

CHANGES = [
    (
        """\
        if len(holders) > 1:
            group = comm.group(holders)
            grads[e] = {name: group.all_reduce(g) for name, g in grads[e].items()}
""",
        "",
    ),
]
