"""Forgets that stage 3 gathers a unit's weights before computing with it.

fails: test_peak_is_ledger_activations_and_gathered_weights
"""

import solution
from solution import *  # noqa: F403


def peak_bytes(model, rules, convention, batch, sequence, ranks, stage, **options):
    shapes = solution.decoder_shapes(**model)
    sizes = {k: v for k, v in model.items() if k != "tied"}
    kept = sum(solution.ledger(shapes, rules, convention, ranks, stage).values())
    return kept + solution.activation_bytes(batch, sequence, **sizes, **options)


solution.peak_bytes = peak_bytes
