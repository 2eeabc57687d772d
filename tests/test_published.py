"""The published tables, checked for slips of the pen by the identities that their authors state."""

import pytest

from manyranks.published import (
    A100_PEAK_TFLOPS,
    ALL_REDUCE_BUSBW_GBPS,
    ALL_REDUCE_SIZES,
    BUBBLE_RATES,
    BUBBLE_STAGES,
    LAYER_TIMES,
    MEGATRON_SEQUENCE,
    MEGATRON_VOCABULARY,
    PREDICTORS,
    RECOMPUTATION,
    WEAK_SCALING,
    ZERO_MEMORY_GB,
)
from manyranks.runtime.hardware import GPUS


def parameters(hidden, layers):
    """Narayanan et al. 2021, equation 2."""
    return (
        12
        * layers
        * hidden**2
        * (1 + 13 / (12 * hidden) + (MEGATRON_VOCABULARY + MEGATRON_SEQUENCE) / (12 * layers * hidden))
    )


@pytest.mark.parametrize("row", WEAK_SCALING)
def test_weak_scaling_rows_are_consistent(row):
    assert parameters(row.hidden, row.layers) / 1e9 == pytest.approx(row.parameters_billion, abs=0.06)
    assert row.percent_of_peak == pytest.approx(100 * row.tflops_per_gpu / A100_PEAK_TFLOPS, abs=0.6)
    data_parallel, rest = divmod(row.gpus, row.tensor_parallel * row.pipeline_parallel)
    assert rest == 0 and row.batch % (data_parallel * row.micro_batch) == 0
    assert row.hidden % row.heads == 0 and row.layers % (row.pipeline_parallel * row.virtual_stages) == 0
    assert A100_PEAK_TFLOPS * 1e12 == GPUS["A100"].peak_flops


@pytest.mark.parametrize("row", RECOMPUTATION)
def test_recomputation_rows_are_consistent(row):
    assert parameters(row.hidden, row.layers) / 1e9 == pytest.approx(
        {"22B": 22, "175B": 175, "530B": 530, "1T": 1008}[row.model], rel=0.02
    )
    assert row.gpus == row.tensor_parallel * row.pipeline_parallel  # no data parallelism
    assert row.selective_seconds < row.full_seconds and row.selective_mfu_percent < row.selective_hfu_percent
    # MFU from the time. Model FLOPs: Narayanan's 96 B s l h^2 (...) without the quarter that is recomputation
    model = (
        72
        * row.batch
        * MEGATRON_SEQUENCE
        * row.layers
        * row.hidden**2
        * (1 + MEGATRON_SEQUENCE / (6 * row.hidden) + MEGATRON_VOCABULARY / (12 * row.layers * row.hidden))
    )
    mfu = model / row.selective_seconds / row.gpus / (A100_PEAK_TFLOPS * 1e12)
    assert 100 * mfu == pytest.approx(row.selective_mfu_percent, abs=0.7)


def test_full_recomputation_adds_one_forward():
    baseline, full = LAYER_TIMES["baseline"], LAYER_TIMES["full recompute"]
    assert full.forward_ms == baseline.forward_ms
    assert full.backward_ms - baseline.backward_ms == pytest.approx(baseline.forward_ms, abs=0.2)


@pytest.mark.parametrize("ranks, row", ZERO_MEMORY_GB.items())
def test_zero_memory_follows_its_formula(ranks, row):
    psi = 7.5  # billion parameters; 2 bytes of weights, 2 of gradients, K = 12 of optimizer state
    formula = (4 * psi + 12 * psi / ranks, 2 * psi + 14 * psi / ranks, 16 * psi / ranks)
    assert row == pytest.approx(formula, abs=0.051)


@pytest.mark.parametrize("m, row", BUBBLE_RATES.items())
def test_measured_bubbles_lie_above_the_ideal(m, row):
    ideal = (BUBBLE_STAGES - 1) / (m + BUBBLE_STAGES - 1)
    assert ideal < row.one_f_one_b < 1.3 * ideal
    assert row.zb_h2 < row.zb_h1 < row.one_f_one_b and row.interleaved < row.one_f_one_b


def test_bus_bandwidth_curves():
    assert ALL_REDUCE_SIZES[0] == 1024 and ALL_REDUCE_SIZES[-1] == 8 * 2**30
    for curve in ALL_REDUCE_BUSBW_GBPS.values():
        values = list(curve.values())
        assert tuple(curve) == ALL_REDUCE_SIZES and values == sorted(values)
    a100 = ALL_REDUCE_BUSBW_GBPS["A100"]
    assert [a100[2**i] for i in (10, 16, 20, 26, 33)] == [0.04, 2.70, 36.22, 166.63, 231.58]
    assert a100[2**33] * 1e9 < GPUS["A100"].link_bandwidth
    assert ALL_REDUCE_BUSBW_GBPS["H200"][2**33] * 1e9 > GPUS["H200"].link_bandwidth  # reduced in the switch


def test_predictors_say_what_they_were_held_to():
    assert {p.name for p in PREDICTORS} == {"Calculon", "vTrain", "ASTRA-sim 2.0", "Proteus"}
    assert all(p.percent_error > 0 and p.what and p.citation for p in PREDICTORS)
