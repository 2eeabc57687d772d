"""Each rank sends its share of a block's gradients to the block's owner, past the ranks between.

fails: test_backward_comes_home_along_the_ring, test_backward_with_empty_shards
"""

CHANGES = [
    (
        """\
    for i, (_, start, _) in enumerate(mine):  # the next rank adds first, then this one
        if i < len(theirs):
            shares[i][:, theirs[i][1] - start :] += comm.recv(following)
        if i:
            sending.append(comm.isend(shares[i], previous))
""",
        """\
    sending = [comm.isend(share, mine[i][0]) for i, share in enumerate(shares) if i]
    for rank, needed in enumerate(needs):
        for source, start, _ in needed:
            if source == comm.rank != rank:
                shares[0][:, start - bounds[source] :] += comm.recv(rank)
""",
    ),
]
