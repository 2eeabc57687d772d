"""After choices have been dropped the weights of the others are scaled to a sum of 1.

fails: test_forward_equals_dense, test_gradients_of_tokens_and_weights, test_gradients_of_experts
"""

import numpy as np
from solution import *  # noqa: F403
from solution import moe_layer as as_they_are


def moe_layer(comm, part, placement, node):
    """The layer's output for this rank's tokens; with part["dy"] also the gradients."""
    weight = np.where(part["chosen"] >= 0, part["weight"], 0.0)
    total = weight.sum(axis=1, keepdims=True)
    return as_they_are(comm, {**part, "weight": weight / np.where(total > 0, total, 1)}, placement, node)
