"""Keys travel in one message and values in another.

fails: test_forward_moves_only_what_is_read
"""

CHANGES = [
    (
        """\
    total, out = np.zeros(q.shape[:3]), np.zeros(q.shape)
    for i, (_, start, stop) in enumerate(mine):
        going = comm.isend(kv[:, theirs[i][1] - start :], following) if i < len(theirs) else None
        coming = comm.irecv(previous) if i + 1 < len(mine) else None
""",
        """\
    total, out = np.zeros(q.shape[:3]), np.zeros(q.shape)
    for i, (_, start, stop) in enumerate(mine):
        going = [comm.isend(x[theirs[i][1] - start :], following) for x in kv] if i < len(theirs) else []
        coming = [comm.irecv(previous) for _ in range(2)] if i + 1 < len(mine) else []
""",
    ),
    (
        """\
        top = higher
        if going is not None:
            going.wait()
        if coming is not None:
            kv = coming.wait()
""",
        """\
        top = higher
        for work in going:
            work.wait()
        if coming:
            kv = np.stack([work.wait() for work in coming])
""",
    ),
]
