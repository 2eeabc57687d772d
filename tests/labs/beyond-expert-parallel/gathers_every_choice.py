"""All choices of all ranks are gathered, those too that are hopeless on their own rank.

fails: test_keep_heaviest_sends_candidates_only
"""

CHANGES = [
    (
        "own = heaviest(chosen[token, slot], weight[token, slot])",
        "own = np.arange(len(token))",
    ),
]
