"""Goes on adding in the all-gather, where chunks are to be replaced.

fails: test_ring_gives_every_rank_the_sum, test_ring_puts_the_remainder_into_the_last_chunk, test_ring_sums_grow_by_one_rank_a_step, test_ring_uses_what_arrives, test_ring_with_few_elements_or_one_rank, test_average_is_the_serial_mean, test_average_is_the_gradient_of_one_big_batch, test_average_goes_over_the_ring, test_row_split_equals_dense
"""

import numpy as np
from solution import *  # noqa: F403
from solution import carry


def ring_all_reduce(vectors, send=None):
    send = send or carry
    own = [np.array(v) for v in vectors]
    if not own or any(v.ndim != 1 or v.shape != own[0].shape for v in own):
        raise ValueError("vectors must be 1-D and equally long")
    n, length = len(own), len(own[0])
    bounds = [i * (length // n) for i in range(n)] + [length]
    for step in range(2 * (n - 1)):
        messages = []
        for r in range(n):
            c = (r - step) % n
            messages.append((c, send(step, r, (r + 1) % n, own[r][bounds[c] : bounds[c + 1]].copy())))
        for r, (c, message) in enumerate(messages):
            own[(r + 1) % n][bounds[c] : bounds[c + 1]] += message
    return own


def data_parallel_gradient_average(gradients, send=None):
    shape = np.shape(gradients[0])
    sums = ring_all_reduce([np.reshape(g, -1) for g in gradients], send)
    return [s.reshape(shape) / len(gradients) for s in sums]


def tensor_parallel_matmul(shards, x, split, send=None):
    import solution

    if split != "row":
        return solution.tensor_parallel_matmul(shards, x, split, send)
    solution.tensor_parallel_matmul(shards, x, split)  # its checks
    bounds = np.cumsum([0] + [s.shape[1] for s in shards])
    partial = [s @ x[a:b] for s, a, b in zip(shards, bounds, bounds[1:])]
    return ring_all_reduce([p.reshape(-1) for p in partial], send)[0].reshape(partial[0].shape)
