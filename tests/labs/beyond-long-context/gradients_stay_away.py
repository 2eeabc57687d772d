"""A rank keeps the gradients that its own queries give its own keys; those of others are forgotten.

fails: test_gradients_of_keys_and_values, test_backward_comes_home_along_the_ring,
  test_backward_with_empty_shards
"""

CHANGES = [
    (
        "shares[i][:, theirs[i][1] - start :] += comm.recv(following)",
        "pass",
    ),
    (
        "sending.append(comm.isend(shares[i], previous))",
        "pass",
    ),
]
