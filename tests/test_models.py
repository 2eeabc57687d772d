"""Decoders: parameters to the digit of published models, and activations against chapter 1's formula."""

import math

import pytest

from manyranks.memory import Transformer, activation_terms, training_ledger
from manyranks.models import MODELS, Decoder, Latent, as_decoder, decoder_activation_terms

PUBLISHED = {  # parameters of the checkpoints; those that one token uses, in billions
    "llama3-8b": (8_030_261_248, 8.0),
    "llama3-70b": (70_553_706_496, 70.6),
    "llama3-405b": (405_853_388_800, 405.9),
    "mixtral-8x7b": (46_702_792_704, 12.9),
    "deepseek-v3": (671_026_419_200, 37),
}
GPTS = [
    Transformer(96, 12288, 96, 51200, 2048),
    Transformer(7, 512, 4, 1001, 128),
    Transformer(4, 64, 2, 100),
]
SMALL = Decoder(6, 64, 4, 100, ffn=96, kv_heads=2, experts=8, top_k=2, shared_experts=1, dense_layers=2)


@pytest.mark.parametrize("name", MODELS)
def test_published_parameter_counts(name):
    model, (total, active) = MODELS[name], PUBLISHED[name]
    assert model.parameters == total
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert set(MODELS) == set(PUBLISHED)


def test_llama_3_405b_by_hand():
    h, f, kv, v = 16384, 53248, 8 * 128, 128256
    layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
    assert MODELS["llama3-405b"].parameters == 126 * layer + 2 * v * h + h
    assert MODELS["llama3-405b"].layer_parameters == layer


def test_latent_attention_by_hand():
    """DeepSeek-V3: five products and two norms, 187,107,328 parameters a layer."""
    shapes = MODELS["deepseek-v3"].layer_shapes()
    names = [
        n
        for n in shapes
        if n.split(".")[0] in ("q_down", "q_up", "kv_down", "kv_up", "proj", "q_norm", "kv_norm")
    ]
    assert sum(math.prod(shapes[name]) for name in names) == 187_107_328


@pytest.mark.parametrize("gpt", GPTS, ids=lambda gpt: str(gpt.layers))
def test_a_gpt_as_a_decoder_is_the_same_model(gpt):
    model = as_decoder(gpt)
    assert model.shapes() == gpt.shapes() and model.parameters == gpt.parameters
    assert model.layer_parameters == gpt.layer_parameters and as_decoder(model) is model
    assert training_ledger(model.shapes()).total == training_ledger(gpt.shapes()).total
    for attention in ("flash", "stored"):
        for recompute in ("none", "selective", "full"):
            for t, split in ((1, False), (2, False), (2, True)):
                how = dict(
                    attention=attention, recompute=recompute, tensor_parallel=t, sequence_parallel=split
                )
                for dropout in (True, False):
                    ours = decoder_activation_terms(model, 256, dropout=dropout, **how)
                    theirs = activation_terms(256, 1, gpt.hidden, gpt.heads, dropout=dropout, **how)
                    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=1e-14)


@pytest.mark.parametrize("model", [*MODELS.values(), SMALL], ids=[*MODELS, "small"])
def test_the_counts_of_a_layer_are_its_shapes(model):
    for expert in (False, True) if model.experts else (False,):
        cut, whole, experts = model.layer_counts(expert)
        total = sum(math.prod(shape) for shape in model.layer_shapes(expert).values())
        assert cut + whole + experts == total
        assert (experts > 0) == expert and whole >= 2 * model.hidden
    assert model.plain_layers + model.expert_layers == model.layers
    if model.experts:
        used = model.layer_counts(True)[2] * model.top_k // model.experts
        idle = model.parameters - model.active_parameters
        assert idle == model.expert_layers * (model.layer_counts(True)[2] - used)
    norms = model.active_parameters - model.product_parameters - model.vocabulary * model.hidden
    assert 0 <= norms < 4 * model.layers * (3 * model.hidden + model.experts)


def test_activations_of_experts_by_hand():
    # 10 tokens: norms 8h, Q, K, V 2·(64 + 32 + 32), result 2·64, router 4·8, copies 4·2·64, MLPs 6·3·96, sums 4·4
    terms = decoder_activation_terms(SMALL, 10, expert=True)
    assert sum(terms.values()) == 10 * (8 * 64 + 256 + 128 + 32 + 512 + 6 * 3 * 96 + 16)
    assert decoder_activation_terms(SMALL, 10, expert=True, recompute="full") == {"layer input": 1280}
    assert sum(decoder_activation_terms(SMALL, 10).values()) == 10 * (8 * 64 + 256 + 128 + 6 * 96 + 16)


def test_defaults_are_filled_in():
    model = Decoder(2, 64, 4, 100)
    assert (model.ffn, model.kv_heads, model.head_width) == (256, 4, 16)
    assert Decoder(2, 64, 4, 100, experts=4, top_k=1).expert_ffn == 256
    assert Decoder(2, 64, 4, 100, latent=[8, 8, 4, 8, 8]).latent == Latent(8, 8, 4, 8, 8)
    assert Decoder(2, 64, 4, 100, head_width=32).widths == (128, 128, 128, 128)


@pytest.mark.parametrize(
    "wrong, names",
    [
        ({"kv_heads": 3}, "kv_heads"),
        ({"ffn": -1}, "ffn"),
        ({"experts": 2.5}, "experts"),
        ({"experts": 4}, "top_k"),
        ({"experts": 4, "top_k": 5}, "top_k"),
        ({"top_k": 2}, "top_k"),
        ({"shared_experts": 1}, "shared_experts"),
        ({"node_limit": 4}, "node_limit"),
        ({"experts": 4, "top_k": 2, "dense_layers": 3}, "dense_layers"),
        ({"latent": (0, 8, 4, 8, 8)}, "latent query"),
        ({"hidden": 63}, "heads"),
    ],
)
def test_bad_decoders_name_the_field(wrong, names):
    with pytest.raises((ValueError, TypeError), match=names):
        Decoder(**{"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 100, **wrong})
