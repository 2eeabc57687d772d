"""Tokens go to the copies in turn, wherever these are.

fails: test_choose_replicas
"""

CHANGES = [
    (
        """\
            holders = [rank] if rank in holders else near or holders
""",
        "",
    ),
]
