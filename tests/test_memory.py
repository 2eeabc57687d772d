"""Chapter 1's module: the ledger against tensors that exist, activations against what a layer saves, published figures."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import memory
from manyranks.memory import (
    CONVENTIONS,
    OPTIMIZERS,
    Transformer,
    activation_bytes,
    activation_terms,
    training_flops,
    training_ledger,
    training_seconds,
)
from manyranks.published import RECOMPUTATION, WEAK_SCALING, ZERO_MEMORY_GB

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

SHAPES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.lists(st.integers(1, 40), min_size=0, max_size=4).map(tuple), min_size=1
)
BY_SHAPE = ("adafactor", "muon")


def test_worked_examples():
    result = doctest.testmod(memory)
    assert result.attempted > 15 and result.failed == 0


# ------------------------------------------------------------------------------------------------ the ledger


@pytest.mark.parametrize("convention, each", [("mixed16", 16), ("mixed18", 18), ("mixed20", 20), ("fp32", 16), ("bf16", 8)])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_bytes_per_parameter_of_each_convention(convention, each, optimizer):
    ledger = training_ledger(7_000_000_000, optimizer, convention)
    assert ledger.per_parameter == each
    assert ledger.total == each * 7_000_000_000 == ledger.weight + ledger.gradient + ledger.optimizer


def test_each_term_of_sixteen_bytes():
    assert training_ledger(10**9).terms == {
        "weight": 2e9, "gradient (16-bit)": 2e9, "master weight": 4e9, "first moment": 4e9, "second moment": 4e9,
    }  # fmt: skip
    assert training_ledger(10**9, "adamw", "fp32").terms == {
        "weight": 4e9, "gradient (32-bit)": 4e9, "first moment": 4e9, "second moment": 4e9,
    }  # fmt: skip


def test_optimizers_in_order_of_what_they_keep():
    gpt = Transformer(layers=4, hidden=256, heads=4, vocabulary=1000)
    kept = {name: training_ledger(gpt.shapes(), name).total for name in OPTIMIZERS}
    assert kept["sgd"] < kept["adafactor"] < kept["adam8bit"] < kept["momentum"] == kept["lion"] < kept["muon"] < kept["adamw"]


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, optimizer=st.sampled_from(OPTIMIZERS), convention=st.sampled_from(list(CONVENTIONS)))
def test_a_model_is_the_sum_of_its_tensors(shapes, optimizer, convention):
    whole = training_ledger(shapes, optimizer, convention)
    parts = [training_ledger({name: shape}, optimizer, convention) for name, shape in shapes.items()]
    assert whole.parameters == sum(math.prod(shape) for shape in shapes.values())
    assert whole.total == sum(part.total for part in parts)
    if optimizer not in (*BY_SHAPE, "adam8bit"):
        counters = whole.terms.get("step counters", 0)
        assert whole.total - counters == training_ledger(whole.parameters, optimizer, convention).total


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, ranks=st.integers(1, 100), convention=st.sampled_from(list(CONVENTIONS)))
def test_sharding(shapes, ranks, convention):
    ledger = training_ledger(shapes, "adamw", convention)
    stages = [ledger.sharded(ranks, stage) for stage in range(4)]
    assert stages[0] == ledger == ledger.sharded(1)
    assert stages[0].total >= stages[1].total >= stages[2].total >= stages[3].total
    counters = ledger.terms["step counters"]
    assert stages[3].total == pytest.approx((ledger.total - counters) / ranks + counters)
    assert stages[1].gradient == ledger.gradient and stages[2].weight == ledger.weight
    assert all(stage.parameters == ledger.parameters for stage in stages)


def test_small_tensors_stay_in_32_bits_in_8_bit_adam():
    assert sum(memory.optimizer_state("adam8bit", (4095,)).values()) == 8 * 4095
    assert sum(memory.optimizer_state("adam8bit", (4096,)).values()) == 2 * 4096 + 2 * 4 * 16
    assert sum(memory.optimizer_state("adam8bit", (4097,)).values()) == 2 * 4097 + 2 * 4 * 17


def test_bad_input():
    for call, message in (
        (lambda: training_ledger(0), "parameters must be a whole number"),
        (lambda: training_ledger(1.5), "parameters must be a whole number"),
        (lambda: training_ledger(True), "parameters must be a whole number"),
        (lambda: training_ledger(10, "adamw", "mixed17"), "convention must be one of mixed16.*got 'mixed17'"),
        (lambda: training_ledger(10, "adamax"), "optimizer must be one of sgd.*got 'adamax'"),
        (lambda: training_ledger(10, "muon"), "parameters must be shapes by name for 'muon'"),
        (lambda: training_ledger(10).sharded(0), "ranks must be 1 or more, got 0"),
        (lambda: training_ledger(10).sharded(2, 4), "stage must be 0, 1, 2 or 3, got 4"),
        (lambda: Transformer(2, 10, 3, 5), "heads must divide hidden, 10, got 3"),
        (lambda: Transformer(0, 10, 2, 5), "layers must be 1 or more, got 0"),
        (lambda: activation_terms(0, 1, 8, 2), "sequence must be 1 or more, got 0"),
        (lambda: activation_terms(8, 1, 8, 2, attention="none"), "attention must be 'stored' or 'flash'"),
        (lambda: activation_terms(8, 1, 8, 2, recompute="all"), "recompute must be 'none', 'selective' or 'full'"),
        (lambda: activation_terms(8, 1, 8, 2, tensor_parallel=0), "tensor_parallel must be 1 or more, got 0"),
        (lambda: training_flops(-1, 2), "parameters and tokens must be positive"),
        (lambda: training_seconds(1, 2, 0), "gpus must be 1 or more"),
        (lambda: memory.optimizer_state("sgd", (2,), element=0), "element must be 1 byte or more"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# ------------------------------------------------------------------------------------------------ real tensors


def perceptron():
    return torch.nn.Sequential(torch.nn.Linear(19, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3)), torch.randn(4, 19)


def convolutions():
    layers = torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(5, 4, 2), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(4 * 7 * 7, 6)), torch.randn(2, 3, 8, 8)


def embedding():
    model = torch.nn.Sequential()
    model.add_module("embed", torch.nn.Embedding(23, 12))
    model.add_module("inside", torch.nn.Linear(12, 20))
    model.add_module("norm", torch.nn.LayerNorm(20))
    model.add_module("head", torch.nn.Linear(20, 23))
    return model, torch.randint(0, 23, (2, 5))


def real_optimizers():
    made = {
        "sgd": lambda name, tensors: torch.optim.SGD(tensors, lr=0.1),
        "momentum": lambda name, tensors: torch.optim.SGD(tensors, lr=0.1, momentum=0.9),
        "adam": lambda name, tensors: torch.optim.Adam(tensors),
        "adamw": lambda name, tensors: torch.optim.AdamW(tensors),
        "adafactor": lambda name, tensors: torch.optim.Adafactor(tensors),
    }
    if hasattr(torch.optim, "Muon"):
        made["muon"] = lambda name, tensors: (
            torch.optim.Muon(tensors)
            if tensors[0].ndim == 2 and "embed" not in name and "head" not in name
            else torch.optim.AdamW(tensors)
        )
    return made


@pytest.mark.parametrize("make", [perceptron, convolutions, embedding], ids=lambda make: make.__name__)
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("name, optimizer", real_optimizers().items(), ids=lambda v: v if isinstance(v, str) else "")
def test_the_ledger_is_what_exists(make, convention, name, optimizer):
    torch.manual_seed(0)
    model, x = make()
    trainer = memory.Trainer(model, optimizer, convention)
    x = x.to(next(model.parameters()).dtype) if x.is_floating_point() else x
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        trainer.backward(model(x).float().square().mean())
        trainer.step()
    assert trainer.ledger() == training_ledger({n: tuple(p.shape) for n, p in model.named_parameters()}, name, convention)
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before)), "it has to learn, too"


@pytest.mark.parametrize("convention", ["mixed16", "mixed18", "mixed20"])
def test_mixed_precision_follows_32_bit_training(convention):
    def final(kept):
        torch.manual_seed(0)
        model, x = perceptron()
        trainer = memory.Trainer(model, lambda name, tensors: torch.optim.SGD(tensors, lr=0.05), kept)
        for _ in range(20):
            model.zero_grad(set_to_none=True)
            for gradient in trainer.long_gradients.values():
                gradient.zero_()
            trainer.backward((model(x.to(model[0].weight.dtype)).float() - 1).square().mean())
            trainer.step()
        masters = trainer.masters or trainer.weights
        return torch.cat([m.detach().reshape(-1) for m in masters.values()])

    assert torch.allclose(final(convention), final("fp32"), atol=2e-2)


def test_a_sharded_model_holds_its_share():
    from manyranks import launch

    def program(comm):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 4))
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        fully_shard(model, mesh=init_device_mesh("cpu", (comm.size,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        return memory.measured_ledger(model.parameters(), gradients, (), [optimizer]), shapes

    for found, shapes in launch(program, ranks=2, device="cpu", timeout=120).results:
        assert found == training_ledger(shapes, "adamw", "fp32").sharded(2)


# ------------------------------------------------------------------------------------------------ transformers


@pytest.mark.parametrize("row", WEAK_SCALING, ids=lambda row: f"{row.parameters_billion:g}B")
def test_parameters_of_published_models(row):
    model = Transformer(row.layers, row.hidden, row.heads, vocabulary=51200, positions=2048)
    assert model.parameters / 1e9 == pytest.approx(row.parameters_billion, abs=0.051)  # printed to one digit
    l, h = row.layers, row.hidden
    formula = 12 * l * h**2 * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * l * h))
    assert model.parameters == pytest.approx(formula + 2 * h, rel=1e-12)  # the formula leaves the last norm out


def test_bloom():
    assert Transformer(70, 14336, 112, 250_880).parameters + 2 * 14336 == 176_247_271_424  # and a norm of the embeddings


@pytest.mark.parametrize("ranks, row", ZERO_MEMORY_GB.items())
def test_zero_table(ranks, row):
    ledger = training_ledger(7_500_000_000)
    for stage, published in enumerate(row, 1):
        assert ledger.sharded(ranks, stage).total / 1e9 == pytest.approx(published, rel=0.003)


# ------------------------------------------------------------------------------------------------ activations


@settings(max_examples=50, deadline=None)
@given(s=st.integers(1, 4000), b=st.integers(1, 9), a=st.sampled_from([1, 2, 8, 96]), width=st.integers(1, 128), t=st.integers(1, 8))
def test_the_published_formulas(s, b, a, width, t):
    h = a * width
    unit, more = s * b * h, 5 * a * s / h
    assert activation_bytes(s, b, h, a) == pytest.approx(unit * (34 + more))
    assert activation_bytes(s, b, h, a, tensor_parallel=t) == pytest.approx(unit * (10 + 24 / t + more / t))
    both = {"tensor_parallel": t, "sequence_parallel": True}
    assert activation_bytes(s, b, h, a, **both) == pytest.approx(unit / t * (34 + more))
    assert activation_bytes(s, b, h, a, recompute="selective", **both) == pytest.approx(34 * unit / t)
    assert activation_bytes(s, b, h, a, recompute="full") == 2 * unit
    assert activation_bytes(s, b, h, a, attention="flash") == 34 * unit + 4 * a * s * b


def test_they_are_bytes_already():
    assert activation_bytes(1, 1, 1, 1) == 34 + 5


@pytest.mark.parametrize("row", RECOMPUTATION, ids=lambda row: row.model)
def test_five_times_smaller(row):
    shape = (2048, row.micro_batch, row.hidden, row.heads)
    lean = activation_bytes(*shape, tensor_parallel=8, sequence_parallel=True, recompute="selective")
    assert 4.9 < activation_bytes(*shape, tensor_parallel=8) / lean < 6.3


def layer(x, weights, heads, attention, dropout):
    """A GPT layer written apart from the chapter's: functions, and one weight for each of Q, K and V."""
    f = torch.nn.functional
    drop = (lambda y: torch.native_dropout(y, 0.1, True)[0]) if dropout else lambda y: y
    b, s, h = x.shape

    def core(q, k, v):
        if attention == "flash":
            return f.scaled_dot_product_attention(q, k, v)
        return drop(torch.softmax(q @ k.mT * (h // heads) ** -0.5, -1)) @ v

    y = f.layer_norm(x, (h,))
    q, k, v = ((y @ w).view(b, s, heads, h // heads).transpose(1, 2) for w in weights[:3])
    if attention == "selective":
        y = torch.utils.checkpoint.checkpoint(core, q, k, v, use_reentrant=False)
    else:
        y = core(q, k, v)
    x = x + drop(y.transpose(1, 2).reshape(b, s, h) @ weights[3])
    return x + drop(f.gelu(f.layer_norm(x, (h,)) @ weights[4]) @ weights[5])


@pytest.mark.parametrize(
    "attention, dropout", [("stored", True), ("stored", False), ("flash", True), ("flash", False), ("selective", True)]
)
@pytest.mark.parametrize("s, b, h, a", [(24, 2, 32, 4), (48, 1, 16, 2)])
def test_activations_are_what_a_layer_saves(attention, dropout, s, b, h, a):
    import torch.utils.checkpoint

    sizes = [(h, h)] * 4 + [(h, 4 * h), (4 * h, h)]
    weights = [torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    found, y = memory.saved_bytes(lambda x: layer(x, weights, a, attention, dropout), x, parameters=weights)
    options = {"recompute": "selective"} if attention == "selective" else {"attention": attention}
    assert found == activation_bytes(s, b, h, a, dropout=dropout, statistic=2, **options)
    y.sum().backward()
    assert all(w.grad is not None for w in weights)


def test_saved_memory_is_counted_once():
    x = torch.ones(10, 10, requires_grad=True)
    w = torch.ones(10, 10, requires_grad=True)
    assert memory.saved_bytes(lambda x: x * x, x)[0] == 400
    assert memory.saved_bytes(lambda x: x.exp()[:, :2] * x.exp()[:, 2:4], x)[0] == 2 * 400  # whole memories, not views
    assert memory.saved_bytes(lambda x: x @ w, x)[0] == 800
    assert memory.saved_bytes(lambda x: x @ w, x, parameters=[w])[0] == 400
    linear = torch.nn.Linear(10, 3)
    assert memory.saved_bytes(linear, torch.ones(2, 10))[0] == 80
    with torch.no_grad():
        assert memory.saved_bytes(linear, torch.ones(2, 10))[0] == 0


# ------------------------------------------------------------------------------------------------ time


def test_time():
    assert training_flops(7e9, 2e12) == 8.4e22
    assert training_flops(7e9, 2e12, recompute=True) == pytest.approx(8.4e22 * 4 / 3)
    assert training_seconds(7e9, 2e12, 8, 1e15) == pytest.approx(8.4e22 / 8e15)
    # Narayanan et al. 2021, training time estimates: GPT-3, 300 billion tokens, 1,024 A100 at 140 TFLOP/s, 34 days
    assert training_seconds(175e9, 300e9, 1024, 140e12, recompute=True) / 86400 == pytest.approx(34, abs=0.3)


def test_rates_of_this_machine():
    from manyranks import launch

    run = launch(memory.machine_rates, ranks=2, device="cpu", timeout=120, x=np.ones((64, 64), dtype=np.float32), repeats=1)
    for rates in run.results:
        assert set(rates) == {"flops", "training", "copy"} and all(rate > 0 for rate in rates.values())
