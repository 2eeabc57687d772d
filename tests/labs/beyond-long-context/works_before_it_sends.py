"""A block is passed on when the work on it is done.

fails: test_forward_overlaps
"""

CHANGES = [
    (
        """\
        going = comm.isend(kv[:, theirs[i][1] - start :], following) if i < len(theirs) else None
        coming = comm.irecv(previous) if i + 1 < len(mine) else None
        seen = _mask(bounds, comm.rank, start, stop, documents, window)
        comm.compute(flops=4 * int(seen.sum()) * heads * d)
""",
        """\
        seen = _mask(bounds, comm.rank, start, stop, documents, window)
        comm.compute(flops=4 * int(seen.sum()) * heads * d)
        going = comm.isend(kv[:, theirs[i][1] - start :], following) if i < len(theirs) else None
        coming = comm.irecv(previous) if i + 1 < len(mine) else None
""",
    ),
]
