"""Stores the tied matrix a second time, under the name of the head.

fails: test_published_models_have_their_published_sizes, test_a_tied_matrix_is_stored_once
"""

import solution
from solution import *  # noqa: F403


def decoder_shapes(
    layers, hidden, heads, kv_heads, ffn, vocabulary, tied=False, real=solution.decoder_shapes
):
    return real(layers, hidden, heads, kv_heads, ffn, vocabulary, tied=False)


solution.decoder_shapes = decoder_shapes  # what builds on it gets this one
