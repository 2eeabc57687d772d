"""Lab of chapter 1: a memory ledger that you could plan with. The README has the rules; complete the functions in order."""

CONVENTIONS = {
    "mixed16": {"weight": 2, "gradients": (2,), "master": 4, "state": 4},
    "mixed18": {"weight": 2, "gradients": (4,), "master": 4, "state": 4},
    "mixed20": {"weight": 2, "gradients": (2, 4), "master": 4, "state": 4},
    "fp32": {"weight": 4, "gradients": (4,), "master": 0, "state": 4},
    "bf16": {"weight": 2, "gradients": (2,), "master": 0, "state": 2},
}


def decoder_shapes(layers, hidden, heads, kv_heads, ffn, vocabulary, tied=False):
    """The shape of every tensor of a Llama-style decoder, by name; a tensor that is used twice is there once.

    Returns: dict from name to a tuple of whole numbers.

    Raises: ValueError if the heads don't divide the hidden size, or the key-value heads the heads.
    """
    raise NotImplementedError(
        "decoder_shapes: list one layer's nine tensors, then what stands around the layers. What is stored if the "
        "output matrix is the embedding?"
    )


def assign_optimizers(shapes, rules):
    """Which optimizer each tensor has.

    Args:
        shapes: as `decoder_shapes` returns them.
        rules: list of (pattern, optimizer); patterns as fnmatch has them. The first one that fits a name counts.

    Returns: dict from name to optimizer.

    Raises: ValueError for a tensor that no rule fits, and for muon on something that is no matrix.
    """
    raise NotImplementedError(
        "assign_optimizers: go through the rules in order, for each tensor, and stop at the first"
    )


def ledger(shapes, rules, convention="mixed16", ranks=1, stage=0):
    """What the fullest rank keeps from step to step.

    Args:
        shapes, rules: as for `assign_optimizers`.
        convention: a name in CONVENTIONS.
        ranks: over which ZeRO shards, 1 or more.
        stage: ZeRO's, 0 to 3.

    Returns: dict with the bytes of "weight", "gradient", "master" and "optimizer".
    """
    raise NotImplementedError(
        "ledger: tensor by tensor, since each has an optimizer of its own; a frozen one has a weight and nothing else"
    )


def activation_bytes(
    batch, sequence, layers, hidden, heads, kv_heads, ffn, vocabulary, attention="flash", recompute="none"
):
    """Bytes of activations at the moment when most of them are alive.

    Args:
        batch, sequence: of the micro-batch on one GPU.
        layers, ...: the model's sizes, as for `decoder_shapes`.
        attention: "flash" or "stored".
        recompute: "none" or "full".
    """
    raise NotImplementedError(
        "activation_bytes: add up what one layer keeps, term by term, and what the head keeps; with recomputation, ask "
        "at which moment of the backward pass most is alive"
    )


def peak_bytes(model, rules, convention, batch, sequence, ranks, stage, **options):
    """Bytes on the fullest rank at the worst moment: ledger, activations, and with stage 3 gathered weights.

    Args:
        model: dict of the arguments of `decoder_shapes`.
        rules, convention, ranks, stage: as for `ledger`.
        batch, sequence, **options: as for `activation_bytes`.
    """
    raise NotImplementedError(
        "peak_bytes: the sum of what you have; and a rank that owns a part of each weight needs a unit's whole "
        "weights while it computes with it"
    )


def fewest_gpus(memory, model, rules, convention, batch, sequence, stage, most=4096, per_node=1, **options):
    """The smallest number of GPUs with `memory` bytes each on which the job fits.

    Args:
        most: no more than so many.
        per_node: GPUs come in nodes of so many.
        The rest: as for `peak_bytes`.

    Returns: a multiple of `per_node`, or None.
    """
    raise NotImplementedError(
        "fewest_gpus: try them, or bisect; does more GPUs always mean fewer bytes on each? Look at stage 3"
    )
