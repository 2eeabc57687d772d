"""Published tables and measurements that the chapters put beside their own, each with its citation.

Numbers of other people, as they printed them, in the units they printed them in (the field names say which).
Make a prediction before you look here, then put the two side by side.
"""

from __future__ import annotations

from typing import NamedTuple

MEGATRON_SEQUENCE = 2048  # s, in both Megatron papers
MEGATRON_VOCABULARY = 51200  # V, in both Megatron papers
A100_PEAK_TFLOPS = 312  # dense fp16, what both papers divide by

NARAYANAN_2021 = (
    "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using "
    "Megatron-LM, SC'21, arXiv:2104.04473"
)
KORTHIKANTI_2022 = (
    "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198"
)
RAJBHANDARI_2020 = (
    "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter "
    "Models, SC'20, arXiv:1910.02054"
)
QI_2024 = "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241"
AZURE_GUIDE = "Microsoft Azure, AI Benchmarking Guide (Azure/AI-benchmarking-guide), Azure_Results"


class WeakScaling(NamedTuple):
    """One row of Narayanan et al. 2021, Table 1; data parallel is gpus / (tensor x pipeline parallel)."""

    parameters_billion: float
    heads: int
    hidden: int
    layers: int
    tensor_parallel: int
    pipeline_parallel: int
    gpus: int
    batch: int  # sequences an iteration, all GPUs together
    micro_batch: int  # b and v are not in the table: from the authors' scripts
    virtual_stages: int
    tflops_per_gpu: float
    percent_of_peak: float  # counts the recomputation: an HFU


# A100-80GB, 8 a node, NVLink 300 GB/s one way, 8 x 200 Gb/s HDR a node; fp16, full recomputation.
WEAK_SCALING: tuple[WeakScaling, ...] = (
    WeakScaling(1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137, 44),
    WeakScaling(7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142, 46),
    WeakScaling(39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138, 44),
    WeakScaling(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148, 47),
    WeakScaling(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163, 52),
)


class Recomputation(NamedTuple):
    """One row of Korthikanti et al. 2022, Tables 3 and 5: iterations with full or selective recomputation."""

    model: str
    heads: int
    hidden: int
    layers: int
    tensor_parallel: int
    pipeline_parallel: int
    gpus: int
    batch: int
    micro_batch: int
    virtual_stages: int  # 3 for 175B and 530B, per the paper
    full_seconds: float  # full recomputation, tensor parallel only
    selective_seconds: float  # sequence parallel and selective recomputation
    selective_mfu_percent: float
    selective_hfu_percent: float


# A100-80GB, fp16, no data parallelism.
RECOMPUTATION: tuple[Recomputation, ...] = (
    Recomputation("22B", 64, 6144, 48, 8, 1, 8, 4, 4, 1, 1.42, 1.10, 41.5, 43.7),
    Recomputation("175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3, 18.13, 13.75, 51.4, 52.8),
    Recomputation("530B", 128, 20480, 105, 8, 35, 280, 280, 1, 3, 49.05, 37.83, 56.0, 57.0),
    Recomputation("1T", 160, 25600, 128, 8, 64, 512, 512, 1, 1, 94.42, 71.49, 56.3, 57.0),
)


class LayerTime(NamedTuple):
    """Milliseconds of one transformer layer; the backward includes the recomputation, if any."""

    forward_ms: float
    backward_ms: float


# Korthikanti et al. 2022, Table 4: one layer of the 22B model, tensor parallel 8.
LAYER_TIMES: dict[str, LayerTime] = {
    "baseline": LayerTime(7.7, 11.9),
    "sequence parallel": LayerTime(7.2, 11.8),
    "full recompute": LayerTime(7.7, 19.5),
    "selective recompute": LayerTime(7.7, 13.2),
    "selective recompute + sequence parallel": LayerTime(7.2, 13.1),
}

# Rajbhandari et al. 2020, Table 1: GB a device for the 7.5B model (K = 12), by data parallel ranks: (stage 1,
# stage 2, stage 3).
ZERO_MEMORY_GB: dict[int, tuple[float, float, float]] = {
    1: (120, 120, 120),
    4: (52.5, 41.3, 30),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
}


class BubbleRates(NamedTuple):
    """One row of Qi et al. 2024, Table 5: idle part of the makespan, from profiled times (1.5B, p = 8)."""

    one_f_one_b: float
    interleaved: float
    zb_h1: float
    zb_h2: float


BUBBLE_STAGES = 8  # p
BUBBLE_RATES: dict[int, BubbleRates] = {  # by m, the number of micro-batches
    24: BubbleRates(0.2431, 0.1055, 0.1585, 0.1083),
    32: BubbleRates(0.1985, 0.0818, 0.1242, 0.0837),
    64: BubbleRates(0.1240, 0.0443, 0.0674, 0.0444),
}

# Azure guide, ND_A100_v4_results.md and ND_H200_v5_results.md: bus bandwidth in GB/s of an in-place NCCL
# all-reduce on the 8 GPUs of one machine, by size in bytes. The guide prints rounded names (65K, 132K);
# nccl-tests steps by powers of two. Its heading says "NVLS algorithm" for both. An A100 node's NVSwitch can't
# reduce, so that column must be ring and tree; the H200's 480 GB/s tops its wires' 450, as its switch does.
ALL_REDUCE_SIZES: tuple[int, ...] = tuple(2**i for i in range(10, 34))
# fmt: off
ALL_REDUCE_BUSBW_GBPS: dict[str, dict[int, float]] = {
    "A100": dict(zip(ALL_REDUCE_SIZES, (  # ND A100 v4, NCCL 2.18.5
        0.04, 0.08, 0.17, 0.33, 0.67, 1.37, 2.70, 5.15, 10.11, 19.24, 36.22, 53.54, 71.43, 89.99, 109.22,
        132.77, 166.63, 174.18, 213.87, 221.58, 228.10, 230.22, 230.48, 231.58), strict=True)),
    "H200": dict(zip(ALL_REDUCE_SIZES, (  # ND H200 v5, NCCL 2.20.5
        0.06, 0.12, 0.23, 0.47, 0.93, 1.84, 3.72, 7.39, 14.75, 29.38, 52.96, 88.78, 138.44, 181.94, 240.41,
        300.91, 368.11, 412.45, 432.24, 442.72, 467.58, 472.57, 477.41, 479.98), strict=True)),
}
# fmt: on


class Predictor(NamedTuple):
    """How far a published performance model is from the runs that its authors validated it on, in percent."""

    name: str
    percent_error: float
    what: str
    citation: str


PREDICTORS: tuple[Predictor, ...] = (
    Predictor(
        "Calculon",
        3.65,
        "mean of the eight iteration times in RECOMPUTATION (largest 8.87)",
        "Isaev et al., Calculon, SC'23",
    ),
    Predictor("vTrain", 8.4, "mean, one node", "Bang et al., vTrain, MICRO 2024, arXiv:2312.12391"),
    Predictor("vTrain", 14.7, "mean, many nodes", "Bang et al., vTrain, MICRO 2024, arXiv:2312.12391"),
    Predictor(
        "ASTRA-sim 2.0",
        5.0,
        "all-reduce on 4 and 16 V100",
        "Won et al., ASTRA-sim2.0, ISPASS 2023, arXiv:2303.14006",
    ),
    Predictor("Proteus", 3.0, "mean", "Duan et al., Proteus, arXiv:2306.02267"),
)
