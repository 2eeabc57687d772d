"""Tests of the lab of chapter 1. LAB_MODULE=solution tests solution.py instead of lab.py."""

import importlib
import math
import os

import numpy as np
import pytest

from manyranks.memory import training_ledger

lab = importlib.import_module(os.environ.get("LAB_MODULE", "lab"))
SEED = int(os.environ.get("LAB_SEED", "1"))

LLAMA_2_7B = dict(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocabulary=32000)
LLAMA_3_8B = dict(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
LLAMA_32_1B = dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocabulary=128256, tied=True)
ALL = [("*", "adamw")]


def random_models(count=4, salt=0):
    """Small models of odd sizes."""
    rng = np.random.default_rng([SEED, salt])
    for _ in range(count):
        kv, group, d = (int(n) for n in rng.integers(1, 5, size=3))
        layers, ffn, vocabulary = (int(n) for n in rng.integers(2, 60, size=3))
        yield dict(
            layers=layers,
            hidden=kv * group * d,
            heads=kv * group,
            kv_heads=kv,
            ffn=ffn,
            vocabulary=vocabulary,
        )


def count(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


def without_tied(model):
    return {k: v for k, v in model.items() if k != "tied"}


# ---------------------------------------------------------------------------- the model


@pytest.mark.points(6)
def test_published_models_have_their_published_sizes():
    """Llama 2 7B, Llama 3 8B and Llama 3.2 1B have as many parameters as published."""
    # KerasHub's presets of Llama 2 7B and Llama 3 8B; GPTQModel's tests/test_parameter_count.py for Llama 3.2 1B
    for name, model, published in (
        ("Llama 2 7B", LLAMA_2_7B, 6_738_415_616),
        ("Llama 3 8B", LLAMA_3_8B, 8_030_261_248),
        ("Llama 3.2 1B, tied", LLAMA_32_1B, 1_235_814_400),
    ):
        found = count(lab.decoder_shapes(**model))
        assert found == published, (
            f"{name}: {found:,} parameters, published are {published:,}; {found - published:+,}"
        )


@pytest.mark.points(3)
def test_shapes_have_the_agreed_names():
    """Names, shapes and their orientation are those of the README."""
    found = lab.decoder_shapes(layers=2, hidden=12, heads=6, kv_heads=2, ffn=20, vocabulary=50)
    layer = {
        **{
            "attn.norm": (12,),
            "attn.wq": (12, 12),
            "attn.wk": (12, 4),
            "attn.wv": (12, 4),
            "attn.wo": (12, 12),
        },
        **{"mlp.norm": (12,), "mlp.gate": (12, 20), "mlp.up": (12, 20), "mlp.down": (20, 12)},
    }
    wanted = {"embed": (50, 12), "norm": (12,), "head": (12, 50)}
    wanted |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    found = {name: tuple(shape) for name, shape in found.items()}
    assert set(found) == set(wanted), (
        f"names: missing {set(wanted) - set(found)}, too many {set(found) - set(wanted)}"
    )
    assert found == wanted, (
        f"shapes differ: { {k: (v, wanted[k]) for k, v in found.items() if v != wanted[k]} }"
    )


@pytest.mark.points(5)
def test_a_tied_matrix_is_stored_once():
    """Tying takes away vocabulary x hidden parameters, and nothing else."""
    for model in random_models():
        apart, tied = lab.decoder_shapes(**model), lab.decoder_shapes(**model, tied=True)
        saved = count(apart) - count(tied)
        wanted = model["vocabulary"] * model["hidden"]
        assert saved == wanted, (
            f"{model}: tying saves {saved} parameters, expected {wanted}: one matrix has both uses"
        )
        more = lab.decoder_shapes(**{**model, "layers": model["layers"] + 3})
        h, kv = model["hidden"], model["hidden"] // model["heads"] * model["kv_heads"]
        layer = 2 * h * (h + kv + 1) + 3 * h * model["ffn"]
        assert count(more) - count(apart) == 3 * layer, f"{model}: a layer should have {layer} parameters"


@pytest.mark.points(2)
def test_heads_have_to_divide():
    """ValueError if heads don't divide the hidden size, or key-value heads the heads."""
    for bad in (dict(heads=5, kv_heads=1), dict(heads=6, kv_heads=4)):
        with pytest.raises(ValueError):
            lab.decoder_shapes(layers=1, hidden=12, ffn=20, vocabulary=50, **bad)


@pytest.mark.points(6)
def test_the_first_rule_that_fits_counts():
    """Rules are tried in order; a tensor without one, or muon on a vector, is an error."""
    shapes = {"embed": (9, 4), "layers.0.attn.norm": (4,), "layers.0.attn.wq": (4, 4), "norm": (4,)}
    rules = [("*norm", "adamw"), ("layers.*", "muon"), ("*", "lion")]
    found = lab.assign_optimizers(shapes, rules)
    wanted = {"embed": "lion", "layers.0.attn.norm": "adamw", "layers.0.attn.wq": "muon", "norm": "adamw"}
    assert found == wanted, f"{found}, expected {wanted}: the first pattern that fits a name counts"
    swapped = lab.assign_optimizers(shapes, rules[::-1])
    assert set(swapped.values()) == {"lion"}, f"with '*' first, everything is its: {swapped}"
    for rules in ([("layers.*", "adamw")], [("*", "muon")]):
        try:
            found = lab.assign_optimizers(shapes, rules)
        except ValueError:
            continue
        pytest.fail(
            f"rules {rules} gave {found}; a tensor without optimizer, or Muon on a vector, is a mistake to report"
        )


# ---------------------------------------------------------------------------- the ledger


@pytest.mark.points(8)
def test_one_optimizer_for_all_gives_the_chapters_ledger():
    """With a single rule the terms are those of the chapter, in each convention."""
    for model in random_models(3, 1):
        shapes = lab.decoder_shapes(**model) | {"big": (70, 90), "deep": (3, 40, 50)}
        for optimizer in ("sgd", "momentum", "adamw", "lion", "adam8bit", "adafactor"):
            for convention in ("mixed16", "mixed18", "mixed20", "fp32", "bf16"):
                theirs = training_ledger(shapes, optimizer, convention)
                master = theirs.terms.get("master weight", 0)
                wanted = {
                    "weight": theirs.weight,
                    "gradient": theirs.gradient,
                    "master": master,
                    "optimizer": theirs.optimizer - master - theirs.terms.get("step counters", 0),
                }
                found = lab.ledger(shapes, [("*", optimizer)], convention)
                assert found == wanted, (
                    f"{optimizer}, {convention}: {found}, the chapter's ledger says {wanted}"
                )


@pytest.mark.points(8)
def test_mixed_optimizers_add_up():
    """Each tensor pays for its own optimizer: the whole is the sum of the parts."""
    for model in random_models(3, 2):
        shapes = lab.decoder_shapes(**model) | {"big": (80, 90)}
        rules = [
            ("*norm", "adamw"),
            ("embed", "adafactor"),
            ("head", "lion"),
            ("big", "adam8bit"),
            ("*", "muon"),
        ]
        found = lab.ledger(shapes, rules, "mixed18")
        inside = {k: v for k, v in shapes.items() if k.startswith("layers") and not k.endswith("norm")}
        parts = [
            training_ledger({k: v for k, v in shapes.items() if k.endswith("norm")}, "adamw", "mixed18"),
            training_ledger({"embed": shapes["embed"]}, "adafactor", "mixed18"),
            training_ledger({"head": shapes["head"]}, "lion", "mixed18"),
            training_ledger({"big": shapes["big"]}, "adam8bit", "mixed18"),
            training_ledger(inside, "momentum", "mixed18"),  # muon keeps one number, as momentum does
        ]
        wanted = sum(p.total - p.terms.get("step counters", 0) for p in parts)
        assert sum(found.values()) == wanted, (
            f"{model}: {found}, in all {sum(found.values()):,}; the five groups' own ledgers add up to {wanted:,}"
        )


@pytest.mark.points(6)
def test_frozen_tensors_have_only_weights():
    """A frozen tensor keeps no gradient, no master weight and no state."""
    for model in random_models(3, 3):
        shapes = lab.decoder_shapes(**model)
        found = lab.ledger(shapes, [("*.mlp.*", "adamw"), ("*", "frozen")], "mixed20")
        trained = count({k: v for k, v in shapes.items() if ".mlp." in k})
        wanted = {
            "weight": 2 * count(shapes),
            "gradient": 6 * trained,
            "master": 4 * trained,
            "optimizer": 8 * trained,
        }
        assert found == wanted, (
            f"{trained} of {count(shapes)} parameters are trained: {found}, expected {wanted}"
        )


@pytest.mark.points(6)
def test_stages_shard_what_zero_says():
    """Stage 1 shards master weights and state, 2 gradients too, 3 weights too, frozen ones among them."""
    rng = np.random.default_rng([SEED, 4])
    for ranks in (1, 2, 5):
        shapes = {"a": (int(rng.integers(1, 9)) * ranks, 6), "b": (ranks * 4,), "c": (3, 2 * ranks)}
        n, frozen = count(shapes), math.prod(shapes["c"])
        t = n - frozen
        for stage in range(4):
            found = lab.ledger(shapes, [("c", "frozen"), ("*", "adamw")], "mixed18", ranks, stage)
            cut = [ranks if stage >= needed else 1 for needed in (3, 2, 1, 1)]
            wanted = dict(zip(("weight", "gradient", "master", "optimizer"), (2 * n, 4 * t, 4 * t, 8 * t)))
            wanted = {k: v / c for (k, v), c in zip(wanted.items(), cut)}
            assert found == pytest.approx(wanted), f"{ranks} ranks, stage {stage}: {found}, expected {wanted}"


@pytest.mark.points(7)
def test_the_fullest_rank_counts():
    """A tensor that doesn't divide is rounded up, tensor by tensor."""
    rng = np.random.default_rng([SEED, 5])
    for ranks in (2, 3, 7, 64):
        shapes = {f"t{i}": (int(rng.integers(1, 40)),) for i in range(5)} | {"big": (65, 65)}
        part = sum(-(-math.prod(s) // ranks) for s in shapes.values())
        found = lab.ledger(shapes, [("*", "momentum")], "fp32", ranks, 3)
        assert found == {"weight": 4 * part, "gradient": 4 * part, "master": 0, "optimizer": 4 * part}, (
            f"{[math.prod(s) for s in shapes.values()]} elements on {ranks} ranks: {found}, the fullest rank has {part} "
            "elements. Each tensor is cut by itself, and its largest part is what has to fit."
        )
        mine = -(-4225 // ranks)
        found = lab.ledger({"big": (65, 65)}, [("*", "adam8bit")], "mixed16", ranks, 1)["optimizer"]
        wanted = 2 * mine + 8 * -(-mine // 256)
        assert found == wanted, f"adam8bit, 4225 elements on {ranks} ranks: {found} bytes, expected {wanted}"


@pytest.mark.points(4)
def test_adafactors_factors_stay_whole():
    """Row and column factors need the whole matrix: they aren't sharded, a vector's state is."""
    shapes = {"matrix": (30, 50), "vector": (90,)}
    for ranks in (1, 4, 9):
        found = lab.ledger(shapes, [("*", "adafactor")], "mixed16", ranks, 1)
        wanted = 4 * (30 + 50) + 4 * -(-90 // ranks)
        assert found["optimizer"] == wanted, (
            f"{ranks} ranks: {found['optimizer']} bytes of state, expected {wanted}"
        )
        assert found["master"] == 4 * (-(-1500 // ranks) - (-90 // ranks)), (
            f"{ranks} ranks: master {found['master']}"
        )


@pytest.mark.points(3)
def test_ledger_refuses_what_makes_no_sense():
    """ValueError for an unknown convention, optimizer or stage, and for no ranks."""
    shapes = {"a": (4, 4)}
    for bad in (
        (ALL, "fp8", 1, 0),
        ([("*", "adamax9")], "mixed16", 1, 0),
        (ALL, "mixed16", 1, 4),
        (ALL, "mixed16", 0, 1),
    ):
        with pytest.raises(ValueError):
            lab.ledger(shapes, *bad)


# ---------------------------------------------------------------------------- activations


def slope(name, by, model, **options):
    """How many bytes more, per unit more of one size."""
    low = lab.activation_bytes(**{**model, **options})
    return (lab.activation_bytes(**{**model, name: model[name] + by}, **options) - low) / by


@pytest.mark.points(9)
def test_each_term_of_the_activations():
    """Bytes grow with each size as the terms say: MLP 8, key and value 4, logits 4, all with the tokens."""
    for model in random_models(4, 6):
        model = {**model, "batch": 3, "sequence": 7}
        tokens, layers, d = 21, model["layers"], model["hidden"] // model["heads"]
        base = lab.activation_bytes(**model)
        assert lab.activation_bytes(**{**model, "batch": 6}) == pytest.approx(2 * base), (
            "twice the batch, twice the bytes"
        )
        assert slope("ffn", 5, model) == pytest.approx(8 * tokens * layers), (
            f"each unit of ffn should cost 8 bytes a token and layer, not {slope('ffn', 5, model) / tokens / layers}: "
            "gate before and after SiLU, up, and their product are all needed"
        )
        assert slope("vocabulary", 5, model) == pytest.approx(4 * tokens), (
            "the logits are kept once, in 32 bits"
        )
        grouped = {**model, "heads": 12, "kv_heads": 4, "hidden": 24}
        grown = lab.activation_bytes(**{**grouped, "kv_heads": 12}) - lab.activation_bytes(**grouped)
        assert grown == pytest.approx(8 * 2 * 2 * 2 * tokens * layers), (
            f"8 more key-value heads of size 2 should keep 64 bytes more a token and layer, not {grown / tokens / layers}"
        )
        alone = {**model, "layers": 1}
        layer = slope("layers", 1, alone)
        wanted = tokens * (
            12 * model["hidden"] + 4 * d * model["kv_heads"] + 8 * model["ffn"] + 4 * model["heads"]
        )
        assert layer == pytest.approx(wanted), f"{model}: a layer keeps {layer} bytes, expected {wanted}"
        head = lab.activation_bytes(**alone) - layer
        wanted = tokens * (4 * model["hidden"] + 4 * model["vocabulary"])
        assert head == pytest.approx(wanted), (
            f"around the layers {head} bytes, expected {wanted}: last norm and logits"
        )


@pytest.mark.points(3)
def test_stored_scores_grow_with_the_square():
    """Stored scores cost 2·a·s² bytes a sequence and layer, FlashAttention 4·a·s."""
    for sequence in (1, 6, 33):
        m = dict(batch=2, sequence=sequence, layers=3, hidden=24, heads=12, kv_heads=4, ffn=10, vocabulary=50)
        more = lab.activation_bytes(**m, attention="stored") - lab.activation_bytes(**m, attention="flash")
        wanted = 2 * 3 * 12 * (2 * sequence**2 - 4 * sequence)
        assert more == pytest.approx(wanted), (
            f"{sequence} tokens: stored needs {more} bytes more, expected {wanted}"
        )
    with pytest.raises(ValueError):
        lab.activation_bytes(**m, attention="linear")


@pytest.mark.points(7)
def test_recomputation_peaks_in_one_layer_or_in_the_head():
    """Kept are the layers' inputs, and at the worst moment a whole layer or the head beside them."""
    seen = set()
    small = dict(batch=2, sequence=9, layers=5, hidden=24, heads=12, kv_heads=4)
    for ffn, vocabulary in ((10, 500), (300, 20), (64, 64)):
        for attention in ("flash", "stored"):
            m = {**small, "ffn": ffn, "vocabulary": vocabulary, "attention": attention}
            one = lab.activation_bytes(**{**m, "layers": 1})
            layer = lab.activation_bytes(**{**m, "layers": 2}) - one
            head = one - layer
            own = layer - 2 * 18 * 24
            seen.add(own > head)
            wanted = 5 * 2 * 18 * 24 + max(own, head)
            found = lab.activation_bytes(**m, recompute="full")
            assert found == pytest.approx(wanted), (
                f"ffn {ffn}, vocabulary {vocabulary}: {found} bytes, expected {wanted}: five inputs of 864, and then "
                f"the larger of the head ({head}) and the rest of one layer ({own}), which are never alive together"
            )
    assert seen == {True, False}
    with pytest.raises(ValueError):
        lab.activation_bytes(**m, recompute="half")


# ---------------------------------------------------------------------------- the plan


@pytest.mark.points(7)
def test_peak_is_ledger_activations_and_gathered_weights():
    """Stage 3 needs its largest unit's whole weights on top, from the second rank on."""
    for model in [
        *random_models(2, 7),
        dict(layers=3, hidden=24, heads=12, kv_heads=4, ffn=10, vocabulary=5, tied=True),
    ]:
        shapes = lab.decoder_shapes(**model)
        activations = lab.activation_bytes(2, 9, **without_tied(model), recompute="full")
        layer = count({k: v for k, v in shapes.items() if k.startswith("layers.0.")})
        unit = 2 * max(layer, *(math.prod(s) for k, s in shapes.items() if not k.startswith("layers.")))
        for ranks, stage in ((1, 0), (4, 2), (1, 3), (4, 3), (7, 3)):
            found = lab.peak_bytes(model, ALL, "mixed16", 2, 9, ranks, stage, recompute="full")
            wanted = sum(lab.ledger(shapes, ALL, "mixed16", ranks, stage).values()) + activations
            wanted += unit if stage == 3 and ranks > 1 else 0
            assert found == pytest.approx(wanted), (
                f"{model}, {ranks} ranks, stage {stage}: {found} bytes, expected {wanted} (ledger, activations"
                f"{f', and {unit} for the largest of embed, head and a layer' if stage == 3 else ''})"
            )


@pytest.mark.points(10)
def test_fewest_gpus():
    """The job fits on the answer, on no smaller number of whole nodes, and None means none."""
    answers = []
    for model, memory, stage, per_node, most, options in (
        (LLAMA_3_8B, 80e9, 0, 1, 64, {}),
        (LLAMA_3_8B, 80e9, 1, 1, 64, {"recompute": "full"}),
        (LLAMA_3_8B, 80e9, 3, 8, 4096, {}),
        (LLAMA_3_8B, 8e9, 3, 4, 4096, {"recompute": "full"}),
        (LLAMA_3_8B, 17e9, 3, 8, 8, {"recompute": "full"}),
        (LLAMA_32_1B, 10e9, 2, 3, 1000, {"attention": "stored", "recompute": "full"}),
        (LLAMA_32_1B, 23e9, 3, 1, 1, {"recompute": "full"}),
    ):
        job = (model, ALL, "mixed16", 1, 4096)
        found = lab.fewest_gpus(memory, *job, stage, most=most, per_node=per_node, **options)
        case = f"{model['layers']} layers, {memory / 1e9:g} GB, stage {stage}, nodes of {per_node}, {options}"
        answers.append(found)
        if found is None:
            tried = range(per_node, most + 1, per_node)
        else:
            assert found % per_node == 0 and per_node <= found <= most, (
                f"{case}: {found} is no number of whole nodes"
            )
            need = lab.peak_bytes(*job, found, stage, **options)
            assert need <= memory, f"{case}: on {found} GPUs it needs {need / 1e9:.1f} GB on each"
            tried = range(per_node, found, per_node)
        for n in sorted({*tried[:2], *tried[-2:]}):
            need = lab.peak_bytes(*job, n, stage, **options)
            assert need > memory, f"{case}: answer {found}, but it fits on {n}: {need / 1e9:.1f} GB"
    assert answers[0] is None and answers[4] is None, (
        f"some jobs don't fit on any number of GPUs allowed: {answers}"
    )
    assert answers[2] and answers[3], (
        f"enough GPUs of that size hold 8 billion parameters in shards: {answers}"
    )
    for model in random_models(3, 8):  # exactly as much memory as some number of GPUs needs
        job = (model, ALL, "mixed18", 1, 5)
        memory = lab.peak_bytes(*job, 7, 2)
        wanted = next(n for n in range(1, 8) if lab.peak_bytes(*job, n, 2) <= memory)
        found = lab.fewest_gpus(memory, *job, 2)
        assert found == wanted, f"{model}, {memory} bytes, which is what {wanted} GPUs need: got {found}"
    # One GPU holds its weights whole already; from two on, stage 3 gathers a unit beside its shards.
    frozen = [("*", "frozen")]
    model = dict(layers=1, hidden=64, heads=4, kv_heads=4, ffn=200, vocabulary=300)
    alone = lab.peak_bytes(model, frozen, "mixed16", 1, 1, 1, 3)
    if lab.peak_bytes(model, frozen, "mixed16", 1, 1, 2, 3) > alone:
        found = lab.fewest_gpus(alone, model, frozen, "mixed16", 1, 1, 3, most=2)
        assert found == 1, (
            f"it fits on one GPU and not on two: expected 1, got {found}; more GPUs can need more bytes"
        )
