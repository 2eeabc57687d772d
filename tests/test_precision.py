"""Number formats against ml_dtypes and PyTorch, loss scaling against GradScaler, sums against float64."""

from __future__ import annotations

import doctest
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyranks import precision, simulate
from manyranks.collectives import ring_all_reduce
from manyranks.precision import (
    FORMATS,
    LossScaler,
    number_format,
    quantize,
    ring_error_bound,
    rounded,
    spacing,
    sum_in_fp32,
)

NAMES = tuple(FORMATS)


def test_doctests():
    result = doctest.testmod(precision)
    assert result.attempted > 8 and result.failed == 0


# ---------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    "name, exponent, fraction, largest",
    [
        ("fp32", 8, 23, 2.0**127 * (2 - 2.0**-23)),
        ("fp16", 5, 10, 65504.0),
        ("bf16", 8, 7, 2.0**127 * (2 - 2.0**-7)),
        ("e4m3", 4, 3, 448.0),
        ("e5m2", 5, 2, 57344.0),
    ],
)
def test_formats_are_those_of_their_definitions(name, exponent, fraction, largest):
    has = number_format(name)
    assert (has.exponent, has.fraction, has.largest) == (exponent, fraction, largest)
    assert has.epsilon == 2.0**-fraction
    assert has.smallest == has.normal * 2.0**-fraction


def test_formats_of_eight_bits_are_pytorch_s():
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=500) * 20
    for name, theirs in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        short = torch.tensor(values, dtype=torch.float32).to(theirs).float().numpy()
        assert np.array_equal(rounded(values.astype(np.float32), name), short)


@pytest.mark.parametrize("name", NAMES)
def test_spacing_is_the_distance_to_the_next_number(name):
    has = number_format(name)
    kind = FORMATS[name]
    bits = np.dtype(f"u{kind.itemsize}")
    values = np.exp2(np.linspace(np.log2(has.smallest), np.log2(has.largest) - 1.01, 200))
    held = np.unique(values.astype(kind).astype(np.float64))
    following = (held.astype(kind).view(bits) + bits.type(1)).view(kind).astype(np.float64)
    assert np.array_equal(following - held, spacing(held, name))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.floats(-400, 400, allow_nan=False, allow_subnormal=False))
def test_rounding_errs_by_half_a_spacing_at_most(name, x):
    assert abs(rounded(x, name) - x) <= spacing(x, name) / 2


def test_a_case_by_hand():
    # 0.3 * 512 = 153.6: bf16 holds 154/512. 1000 in fp16: steps of 1/2. Above 65504 there is nothing.
    assert rounded(0.3, "bf16") == 154 / 512
    assert rounded([1000.25, 1000.75, 70000.0], "fp16").tolist() == [1000.0, 1001.0, math.inf]
    assert math.isnan(rounded(1000.0, "e4m3"))


def test_bad_input_names_the_argument():
    with pytest.raises(ValueError, match="name must be one of fp32, fp16"):
        number_format("fp64")
    with pytest.raises(ValueError, match="name must be one of"):
        rounded(1.0, "half")
    with pytest.raises(ValueError, match="x must be at most 448"):
        spacing(500.0, "e4m3")
    with pytest.raises(ValueError, match="x must be at most"):
        spacing([1.0, math.nan], "fp16")
    with pytest.raises(ValueError, match="ranks must be 1 or more"):
        ring_error_bound(0, "bf16")
    with pytest.raises(ValueError, match="x must be finite"):
        quantize([1.0, math.inf], "e4m3")
    with pytest.raises(ValueError, match="amax must be a positive number"):
        quantize([1.0], "e4m3", amax=0.0)


# ---------------------------------------------------------------------------- loss scaling


@pytest.mark.parametrize(
    "option, value",
    [
        ("scale", 0.0),
        ("scale", math.inf),
        ("growth", 1.0),
        ("backoff", 1.0),
        ("backoff", 0.0),
        ("interval", 0),
    ],
)
def test_scaler_refuses(option, value):
    with pytest.raises(ValueError, match=f"^{option} must be"):
        LossScaler(**{option: value})


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from([2.0, 4.0]),
    st.sampled_from([0.5, 0.25]),
)
@example([True, False, True, True, True], 2, 2.0, 0.5)  # an overflow begins the count anew
def test_decisions_are_gradscaler_s(steps, interval, growth, backoff):
    torch = pytest.importorskip("torch")
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=256.0, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    ours = LossScaler(256.0, growth, backoff, interval)
    for finite in steps:
        optimizer.zero_grad()
        theirs.scale(weight.sum()).backward()
        gradient = weight.grad.numpy().copy()
        if not finite:
            weight.grad.fill_(float("nan"))
            gradient[:] = np.nan
        before = weight.item()
        theirs.step(optimizer)
        theirs.update()
        unscaled, verdict = ours.unscale([gradient])
        assert verdict == finite == (weight.item() != before)
        if finite:
            assert np.isclose(unscaled[0][0], 1.0)
        ours.update(verdict)
        assert ours.scale == theirs.get_scale()
    assert ours.skipped == steps.count(False)


def test_unscaling_is_done_in_32_bits():
    scaler = LossScaler(scale=2.0**20)
    (small,), finite = scaler.unscale([np.array([2.0**-20], np.float16)])
    assert finite and small.dtype == np.float32 and small[0] == np.float32(2.0**-40)


# ---------------------------------------------------------------------------- sums


def inputs_of(ranks, length, name, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=length).astype(FORMATS[name]) for _ in range(ranks)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 20), st.sampled_from(["bf16", "fp16"]), st.integers(0, 5))
def test_ring_stays_within_its_bound(ranks, length, name, seed):
    inputs = inputs_of(ranks, length, name, seed)
    wide = [x.astype(np.float64) for x in inputs]
    for result in simulate(ring_all_reduce, inputs=inputs).results:
        assert result.dtype == FORMATS[name]
        error = np.abs(result.astype(np.float64) - np.sum(wide, axis=0))
        assert (error <= ring_error_bound(ranks, name) * np.sum(np.abs(wide), axis=0) + 1e-12).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 20), st.sampled_from(NAMES), st.integers(0, 5))
def test_sum_in_fp32_rounds_once(ranks, length, name, seed):
    inputs = inputs_of(ranks, length, name, seed)
    total = inputs[0].astype(np.float32)
    for x in inputs[1:]:
        total = total + x.astype(np.float32)
    run = simulate(sum_in_fp32, inputs=inputs)
    for result in run.results:
        assert result.dtype == FORMATS[name]
        assert np.array_equal(result.astype(np.float64), total.astype(FORMATS[name]).astype(np.float64))


def test_sum_in_fp32_sends_the_ring_s_bytes():
    inputs = inputs_of(8, 64, "bf16")
    ours, ring = (simulate(p, inputs=inputs) for p in (sum_in_fp32, ring_all_reduce))
    assert ours.bytes_sent.tolist() == ring.bytes_sent.tolist() == [2 * 2 * 64 * 7 // 8] * 8


def test_ones_in_e4m3_stop_at_sixteen():
    ones = [np.ones(2, ml_dtypes.float8_e4m3fn)] * 24
    assert simulate(ring_all_reduce, inputs=ones).results[0].astype(float).tolist() == [16.0, 16.0]
    assert simulate(sum_in_fp32, inputs=ones).results[0].astype(float).tolist() == [24.0, 24.0]


# ---------------------------------------------------------------------------- eight bits


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["e4m3", "e5m2", "fp16"]), st.floats(1e-12, 1e12), st.integers(0, 5))
def test_quantizing_keeps_relative_precision_near_amax(name, size, seed):
    x = np.random.default_rng(seed).normal(size=30) * size
    q = quantize(x, name)
    has = number_format(name)
    assert np.log2(q.scale) == np.floor(np.log2(q.scale))
    peak = np.abs(q.stored.astype(np.float64)).max()
    assert has.largest / 2 - spacing(has.largest / 2, name) < peak <= has.largest
    near = np.abs(x) > np.abs(x).max() / 8
    assert (np.abs(q.values() - x)[near] <= has.epsilon / 2 * np.abs(x)[near] * (1 + 1e-12)).all()


def test_quantizing_saturates_above_amax_and_takes_zeros():
    q = quantize([1.0, 100.0], "e4m3", amax=1.0)
    assert q.scale == 256.0 and q.values().tolist() == [1.0, 448 / 256]
    assert quantize([0.0, 0.0], "e5m2").values().tolist() == [0.0, 0.0]
    assert quantize([], "e4m3").values().shape == (0,)
    assert quantize([5e-324], "e4m3").scale == 2.0**1023  # largest / amax is infinite
