"""Counts the layers' inputs and the head, and forgets that a layer is there again while it is recomputed.

fails: test_recomputation_peaks_in_one_layer_or_in_the_head
"""

import solution
from solution import *  # noqa: F403


def activation_bytes(*args, real=solution.activation_bytes, recompute="none", **model):
    if recompute != "full":
        return real(*args, **model, recompute=recompute)
    batch, sequence = args or (model["batch"], model["sequence"])
    one = real(*args, **{**model, "layers": 1})
    layer = real(*args, **{**model, "layers": 2}) - one
    return model["layers"] * 2 * batch * sequence * model["hidden"] + one - layer


solution.activation_bytes = activation_bytes
