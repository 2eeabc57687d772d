"""Each expert's output travels home by itself, and the token's own rank weighs and adds them.

fails: test_forward_sends_each_token_once, test_backward_sends_no_more
"""

CHANGES = [
    (
        "home = np.zeros(len(self.rows))",
        "home = np.zeros((len(self.rows), *values.shape[1:]))",
    ),
    (
        "ys, inner = np.zeros_like(xs), {}",
        "ys, inner = np.zeros((len(wanted), h)), {}",
    ),
    (
        'ys[second.row_of[mine]] += second.notes[mine, 1:] * (inner[e] @ experts[e]["w2"])',
        'ys[mine] = inner[e] @ experts[e]["w2"]',
    ),
    (
        """\
    y = first.back(second.back(ys, (between, h)), x.shape)
""",
        """\
    y = np.zeros_like(x)
    np.add.at(y, token, weight[token, slot][:, None] * first.answers(second.answers(ys)))
""",
    ),
]
