"""Lab of chapter 1, a memory ledger that you could plan with: a solution. `python solution.py` prints worked numbers."""

import math
from fnmatch import fnmatchcase

CONVENTIONS = {
    "mixed16": {"weight": 2, "gradients": (2,), "master": 4, "state": 4},
    "mixed18": {"weight": 2, "gradients": (4,), "master": 4, "state": 4},
    "mixed20": {"weight": 2, "gradients": (2, 4), "master": 4, "state": 4},
    "fp32": {"weight": 4, "gradients": (4,), "master": 0, "state": 4},
    "bf16": {"weight": 2, "gradients": (2,), "master": 0, "state": 2},
}


def decoder_shapes(layers, hidden, heads, kv_heads, ffn, vocabulary, tied=False):
    """The shape of every tensor of a Llama-style decoder, each stored tensor once."""
    if hidden % heads or heads % kv_heads:
        raise ValueError(f"heads must divide hidden and kv_heads heads, got {hidden}, {heads}, {kv_heads}")
    kv = hidden // heads * kv_heads
    shapes = {"embed": (vocabulary, hidden)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.attn.norm": (hidden,),
            f"layers.{i}.attn.wq": (hidden, hidden),
            f"layers.{i}.attn.wk": (hidden, kv),
            f"layers.{i}.attn.wv": (hidden, kv),
            f"layers.{i}.attn.wo": (hidden, hidden),
            f"layers.{i}.mlp.norm": (hidden,),
            f"layers.{i}.mlp.gate": (hidden, ffn),
            f"layers.{i}.mlp.up": (hidden, ffn),
            f"layers.{i}.mlp.down": (ffn, hidden),
        }
    shapes["norm"] = (hidden,)
    if not tied:
        shapes["head"] = (hidden, vocabulary)
    return shapes


def assign_optimizers(shapes, rules):
    """Which optimizer each tensor has: the first rule whose pattern fits its name."""
    assigned = {}
    for name, shape in shapes.items():
        fitting = [optimizer for pattern, optimizer in rules if fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(f"no rule fits the tensor {name!r}")
        if fitting[0] == "muon" and len(shape) != 2:
            raise ValueError(f"muon takes matrices, {name!r} has shape {shape}")
        assigned[name] = fitting[0]
    return assigned


def state_bytes(shape, optimizer, state=4, ranks=1):
    """Bytes of an optimizer's own state on the fullest rank, for one tensor cut over `ranks`."""
    whole = math.prod(shape)
    count = math.ceil(whole / ranks)
    if optimizer in ("frozen", "sgd"):
        return 0
    if optimizer in ("momentum", "lion", "muon"):
        return count * state
    if optimizer == "adamw":
        return 2 * count * state
    if optimizer == "adam8bit":
        if whole < 4096:
            return 2 * 4 * count
        return 2 * (count + 4 * math.ceil(count / 256))
    if optimizer == "adafactor":
        if len(shape) < 2:
            return count * state
        return (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]) * state  # not sharded
    raise ValueError(f"unknown optimizer {optimizer!r}")


def ledger(shapes, rules, convention="mixed16", ranks=1, stage=0):
    """Bytes by term on the fullest of `ranks` ranks."""
    if convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}, got {convention!r}")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    rule = CONVENTIONS[convention]
    terms = {"weight": 0, "gradient": 0, "master": 0, "optimizer": 0}
    for name, optimizer in assign_optimizers(shapes, rules).items():
        whole = math.prod(shapes[name])
        part = math.ceil(whole / ranks)
        terms["weight"] += rule["weight"] * (part if stage >= 3 else whole)
        if optimizer == "frozen":
            continue
        terms["gradient"] += sum(rule["gradients"]) * (part if stage >= 2 else whole)
        terms["master"] += rule["master"] * (part if stage >= 1 else whole)
        terms["optimizer"] += state_bytes(shapes[name], optimizer, rule["state"], ranks if stage >= 1 else 1)
    return terms


def activation_bytes(
    batch, sequence, layers, hidden, heads, kv_heads, ffn, vocabulary, attention="flash", recompute="none"
):
    """Bytes of activations at the moment when most are alive, in 16 bits and without dropout."""
    if attention not in ("flash", "stored"):
        raise ValueError(f"attention must be 'flash' or 'stored', got {attention!r}")
    if recompute not in ("none", "full"):
        raise ValueError(f"recompute must be 'none' or 'full', got {recompute!r}")
    tokens = batch * sequence
    kv = hidden // heads * kv_heads
    layer = 2 * tokens * (
        2 * hidden  # inputs of the two norms
        + 2 * hidden  # what comes out of them
        + hidden + 2 * kv  # Q, K, V
        + hidden  # attention's result
        + 4 * ffn  # gate before and after SiLU, up, product
    )  # fmt: skip
    if attention == "flash":
        layer += 4 * heads * tokens  # a 32-bit number a row
    else:
        layer += 2 * heads * tokens * sequence  # the softmax
    head = 2 * tokens * 2 * hidden + 4 * tokens * vocabulary  # last norm's input and output; 32-bit logits
    if recompute == "none":
        return layers * layer + head
    inputs = layers * 2 * tokens * hidden
    # Going backward the head comes first and is gone when the last layer is computed again.
    return inputs + max(head, layer - 2 * tokens * hidden)  # the layer's input is kept already


def peak_bytes(model, rules, convention, batch, sequence, ranks, stage, **options):
    """Bytes on the fullest rank: ledger and activations, and with stage 3 the largest unit's gathered weights."""
    shapes = decoder_shapes(**model)
    total = sum(ledger(shapes, rules, convention, ranks, stage).values())
    sizes = {k: v for k, v in model.items() if k != "tied"}
    total += activation_bytes(batch, sequence, **sizes, **options)
    if stage == 3 and ranks > 1:
        units = {}
        for name, shape in shapes.items():
            unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
            units[unit] = units.get(unit, 0) + math.prod(shape)
        total += CONVENTIONS[convention]["weight"] * max(units.values())
    return total


def fewest_gpus(memory, model, rules, convention, batch, sequence, stage, most=4096, per_node=1, **options):
    """The smallest number of GPUs, in whole nodes, on which the job fits; None if `most` are too few."""

    def fits(nodes):
        ranks = nodes * per_node
        return peak_bytes(model, rules, convention, batch, sequence, ranks, stage, **options) <= memory

    high = most // per_node
    if high < 1 or not fits(high):
        # Stage 3 needs room for gathered weights from the second GPU on: one alone may be enough.
        return 1 if per_node == 1 and most >= 1 and fits(1) else None
    if fits(1):
        return per_node
    low = 1  # doesn't fit; high does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * per_node


LLAMA_3_8B = dict(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
LLAMA_3_1B = dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocabulary=128256, tied=True)


def main():
    """Worked numbers."""
    for name, model in (("Llama 3 8B", LLAMA_3_8B), ("Llama 3.2 1B", LLAMA_3_1B)):
        shapes = decoder_shapes(**model)
        print(f"{name}: {sum(math.prod(s) for s in shapes.values()):,} parameters")
    shapes = decoder_shapes(**LLAMA_3_8B)
    mixed = [("*norm", "adamw"), ("embed", "adamw"), ("head", "adamw"), ("*", "muon")]
    for name, rules in (
        ("AdamW", [("*", "adamw")]),
        ("Muon inside, AdamW outside", mixed),
        ("8-bit Adam", [("*", "adam8bit")]),
        ("MLPs only", [("*.mlp.*", "adamw"), ("*", "frozen")]),
    ):
        terms = ledger(shapes, rules)
        parts = ", ".join(f"{term} {size / 1e9:.2f}" for term, size in terms.items())
        print(f"  {name}: {sum(terms.values()) / 1e9:.2f} GB ({parts})")
    for options in ({}, {"attention": "stored"}, {"recompute": "full"}):
        size = activation_bytes(1, 8192, **LLAMA_3_8B, **options)
        print(f"  activations of 8,192 tokens, {options or 'FlashAttention'}: {size / 1e9:.2f} GB")
    for stage in range(4):
        job = dict(
            model=LLAMA_3_8B,
            rules=[("*", "adamw")],
            convention="mixed16",
            batch=1,
            sequence=8192,
            stage=stage,
        )
        found = fewest_gpus(80e9, **job, recompute="full")
        print(f"  fewest 80 GB GPUs, stage {stage}, full recomputation: {found}")


if __name__ == "__main__":
    main()
