"""Recomputation: the same gradients to the bit, bytes that really live, FLOPs to the last one, PyTorch's the same."""

from __future__ import annotations

import doctest
import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import recomputation
from manyranks.memory import activation_bytes
from manyranks.pipeline import RESIDUAL, residual_params
from manyranks.recomputation import (
    BLOCK,
    SELECTIVE,
    LiveBytes,
    attention_weights,
    best_segment,
    block_flops,
    checkpoint_peak,
    counting,
    recompute_flops,
    stack_gradients,
)
from manyranks.tensor_parallel import attention_forward, block_shapes, initial, take

B, S, H, A, L = 2, 12, 16, 4, 6


@pytest.fixture(scope="module")
def blocks():
    rng = np.random.default_rng(3)
    return [initial(block_shapes(H, A), rng, std=0.2) for _ in range(L)]


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(4).normal(size=(B, S, H))


def step(layers, x, **policy):
    flops = []
    return stack_gradients(layers, counting(x, flops), lambda y: y, **policy), sum(flops)


def layer_bytes(recompute="none"):
    stated = 4 * activation_bytes(S, B, H, A, recompute=recompute, dropout=False)
    return stated + (0 if recompute == "full" else 2 * 8 * B * S)


def test_doctests():
    assert doctest.testmod(recomputation).failed == 0


@pytest.mark.parametrize("functions", [BLOCK, SELECTIVE])
@pytest.mark.parametrize("segment", [None, 1, 2, 4, 5, 6, 9])
def test_gradients_to_the_bit(blocks, x, functions, segment):
    plain, _ = step(blocks, x)
    again, _ = step(blocks, x, functions=functions, segment=segment)
    assert np.array_equal(again.y, plain.y) and np.array_equal(again.dx, plain.dx)
    for ours, expected in zip(again.layers, plain.layers, strict=True):
        assert ours.keys() == expected.keys()
        assert all(np.array_equal(ours[name], expected[name]) for name in expected)


def test_gradients_are_right(blocks, x):
    """A directional derivative by central differences."""
    direction = np.random.default_rng(5).normal(size=x.shape)

    def loss(x):
        return 0.5 * float((step(blocks, x, segment=2)[0].y ** 2).sum())

    slope = (loss(x + 1e-5 * direction) - loss(x - 1e-5 * direction)) / 2e-5
    assert float((step(blocks, x, segment=2)[0].dx * direction).sum()) == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (dict(), "none"),
        (dict(segment=1), "full"),
        (dict(segment=4), "full"),
        (dict(functions=SELECTIVE), "selective"),
    ],
)
def test_flops_as_predicted(blocks, x, policy, what):
    assert step(blocks, x, **policy)[1] == L * (block_flops(B, S, H) + recompute_flops(B, S, H, what))


def test_flops_by_hand():
    """b = 1, s = 2, h = 4: forward 24·2·16 + 4·4·4 = 832; a third of forward and backward."""
    assert block_flops(1, 2, 4) == 3 * 832
    assert recompute_flops(1, 2, 4, "full") == 832
    assert recompute_flops(1, 2, 4, "core") == 64 and recompute_flops(1, 2, 4, "published") == 3 * 64


@pytest.mark.parametrize("segment", [1, 2, 3, 4, 6])
def test_bytes_as_predicted(blocks, x, segment):
    result, _ = step(blocks, x, segment=segment)
    assert result.held == -(-L // segment) * x.nbytes
    first = L % segment or segment  # a short last segment is worked off first, and holds less
    peak = checkpoint_peak(L, segment, layer_bytes(), x.nbytes)
    assert result.peak == (
        peak if first == segment else max(peak - x.nbytes, result.held + first * layer_bytes())
    )


def test_bytes_without_segments(blocks, x):
    plain, selective = step(blocks, x)[0], step(blocks, x, functions=SELECTIVE)[0]
    assert plain.held == plain.peak == L * layer_bytes()
    assert selective.held == selective.peak == L * layer_bytes("selective")
    assert plain.held - selective.held == L * 8 * A * S**2 * B


def test_live_bytes_are_found_out_if_they_are_not_dropped():
    live = LiveBytes()
    kept = np.zeros(100)
    saved = live.watch({"view": kept[:3], "again": kept, "other": (np.zeros(7),)})
    assert live.now == 800 + 56
    del saved
    gc.collect()
    assert live.now == 800 and live.peak == 856  # `kept` is still alive, whatever anybody says
    del kept
    assert live.now == 0


def test_counting_changes_nothing_and_counts_products_only():
    flops = []
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    y = counting(a, flops) @ b
    assert np.array_equal(y, a @ b) and flops == [2 * 2 * 3 * 4]
    y += 1
    z = np.exp(y).sum(axis=0) + np.where(y > 3, y, 0).mean()
    assert flops == [48] and np.array_equal(
        z, np.exp(a @ b + 1).sum(axis=0) + np.where(a @ b + 1 > 3, a @ b + 1, 0).mean()
    )
    batched = counting(np.ones((5, 2, 3)), flops) @ np.ones((5, 3, 7))
    assert flops[-1] == 5 * 2 * 2 * 3 * 7 and batched.shape == (5, 2, 7)


def test_attention_weights_to_the_bit(blocks, x):
    _, saved = attention_forward(take(blocks[0], "attention"), x)
    assert np.array_equal(attention_weights(saved["q"], saved["k"]), saved["weights"])


@settings(max_examples=60)
@given(layers=st.integers(1, 200), layer=st.floats(1, 1e3), entry=st.floats(0.1, 10))
def test_best_segment_is_the_least_and_near_the_root(layers, layer, entry):
    best = best_segment(layers, layer, entry)
    least = checkpoint_peak(layers, best, layer, entry)
    assert all(least <= checkpoint_peak(layers, k, layer, entry) for k in range(1, layers + 1))
    root = (layers * entry / layer) ** 0.5
    assert least <= checkpoint_peak(layers, min(layers, max(1, round(root))), layer, entry)


def test_chain_of_unit_layers_has_its_optimum_at_the_root():
    layers = residual_params(36, width=8)
    rows = np.random.default_rng(0).normal(size=(4, 8))
    peaks = {
        k: step(layers, rows, functions=RESIDUAL, segment=k)[0].peak for k in (1, 2, 3, 4, 6, 9, 12, 18, 36)
    }
    assert min(peaks, key=peaks.get) == 6
    simple = rows.nbytes + rows.size  # the input and a mask
    assert peaks[6] == checkpoint_peak(36, 6, simple, rows.nbytes) - rows.nbytes


def test_pytorch_makes_the_same_trade(blocks, x):
    """The same product counts with checkpoint around each block, early stopping off."""
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
    from torch.utils.flop_counter import FlopCounterMode

    from manyranks.tensor_parallel import block_forward

    # our own array code under autograd; it multiplies the same matrices
    params = [{n: torch.tensor(v, requires_grad=True) for n, v in p.items()} for p in blocks]
    for use, what in ((False, "none"), (True, "full")):
        y = given_x = torch.tensor(x, requires_grad=True)
        with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
            for p in params:
                run = lambda y, p=p: block_forward(p, y)[0]  # noqa: E731
                y = checkpoint(run, y, use_reentrant=False) if use else run(y)
            y.backward(y.detach())
        assert counter.get_total_flops() == L * (block_flops(B, S, H) + recompute_flops(B, S, H, what))
        assert np.allclose(given_x.grad.numpy(), step(blocks, x)[0].dx, rtol=1e-10, atol=1e-12)


def test_no_layers():
    result = stack_gradients([], np.ones(3), lambda y: 2 * y)
    assert np.array_equal(result.dx, 2 * np.ones(3)) and result.layers == [] and result.peak == 0


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: stack_gradients([], np.ones(1), lambda y: y, segment=0), "segment"),
        (lambda: checkpoint_peak(4, 5, 1, 1), "segment"),
        (lambda: best_segment(0, 1, 1), "layers"),
        (lambda: recompute_flops(1, 1, 1, "half"), "what"),
    ],
)
def test_bad_input_names_the_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()
