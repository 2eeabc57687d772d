"""Sends everything to rank 0 and back: the right sum, by the wrong mechanism.

fails: test_ring_puts_the_remainder_into_the_last_chunk, test_ring_takes_2_n_minus_1_steps_to_the_right, test_ring_sums_grow_by_one_rank_a_step, test_ring_uses_what_arrives, test_ring_sends_as_many_bytes_as_promised
"""

import numpy as np
from solution import *  # noqa: F403
from solution import carry


def ring_all_reduce(vectors, send=None):
    send = send or carry
    own = [np.array(v) for v in vectors]
    if not own or any(v.ndim != 1 or v.shape != own[0].shape for v in own):
        raise ValueError("vectors must be 1-D and equally long")
    n, total = len(own), own[0]
    for r in range(1, n):
        total = total + send(r - 1, r, 0, own[r])
    return [total] + [send(n - 2 + r, 0, r, total) for r in range(1, n)]
