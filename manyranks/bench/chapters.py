"""The chapters' own hardware programs: what they run, and the entries that `recorded` gives the chapters' cells.

Each function measures with `start`, which is either `launch` or its counterpart under torchrun, and returns the figures
that are kept under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from manyranks import (
    collectives,
    data_parallel,
    long_context,
    memory,
    mixture_of_experts,
    overlap,
    pipeline,
    tensor_parallel,
    zero,
)
from manyranks.runtime import Comm

__all__ = ["CHAPTERS", "Start"]


class Start(NamedTuple):
    """How to run a rank program.

    Attributes:
        run: called as ``run(program, ranks=..., inputs=..., **shared)``; returns (one result per rank, the world in
            words).
        ranks: how many there are.
        gpu: whether they have GPUs.
    """

    run: Callable[..., tuple[list[Any], str]]
    ranks: int
    gpu: bool


Found = tuple[str, dict[str, Any]]  # the world in words, the figures


def machine_rates(start: Start) -> Found:
    """What a rank reaches: a matrix product, a training step, a copy (chapter 1)."""
    n = 8192 if start.gpu else 1024
    matrix = np.random.default_rng(0).normal(size=(n, n)).astype(np.float32)
    results, world = start.run(memory.machine_rates, ranks=start.ranks, x=matrix, repeats=9)
    return world, {"ranks": start.ranks, "matrix": n, "rates": results}


def all_reduce_sweep(start: Start) -> Found:
    """All-reduce over message sizes: our ring, and the backend's own (chapter 2)."""
    lengths = [4**k for k in range(4, 12)]
    buffer = np.ones(max(lengths), dtype=np.float32)
    seconds, world = {}, ""
    for algorithm in ("ours", "auto"):
        results, world = start.run(
            collectives.all_reduce_sweep, ranks=start.ranks, buffer=buffer, lengths=lengths, repeats=21, algorithm=algorithm
        )  # fmt: skip
        seconds[algorithm] = collectives.quickest(results).tolist()
    return world, {"ranks": start.ranks, "sizes": [4 * n for n in lengths], "seconds": seconds}


def weak_scaling(start: Start) -> Found:
    """Steps of the same work per rank on 1, 2, 4, ... ranks, and the gradient's all-reduce alone (chapter 3)."""
    params = data_parallel.init_mlp((64, 512, 512, 10), dtype=np.float32)
    rng = np.random.default_rng(0)
    data = (rng.random((1024, 64), dtype=np.float32), np.eye(10, dtype=np.float32)[rng.integers(0, 10, 1024)])
    steps, all_reduces, world, most = {}, {}, "", start.ranks
    for n in sorted({1, most} | {2**k for k in range(1, most.bit_length()) if 2**k < most}):
        results, world = start.run(data_parallel.time_steps, ranks=n, params=params, data=data, repeats=25)
        steps[n], all_reduces[n] = collectives.quickest(results).tolist()
    return world, {"ranks": most, "batch_per_rank": 1024, "steps": steps, "all_reduces": all_reduces}


def shards_in_turn(comm: Comm, params: dict, x: np.ndarray, dtype: str, repeats: int) -> dict[str, float]:
    """Seconds of one shard of t, without communication, for each t. In turn, so that all meet the same other work."""
    best = {t: float("inf") for t in (1, 2, 4, 8)}
    for _ in range(repeats):
        for t in best:
            part = tensor_parallel.shard(params, 0, t)
            best[t] = min(best[t], *tensor_parallel.time_block(comm, part, x, 2, dtype))
    return {str(t): seconds for t, seconds in best.items()}


def block_shards(start: Start) -> Found:
    """A transformer block's forward and backward: one shard of 1, 2, 4 and 8 on one device (chapter 4)."""
    hidden, tokens, dtype = (4096, 2048, "bfloat16") if start.gpu else (512, 256, "float32")
    rng = np.random.default_rng(0)
    params = tensor_parallel.initial(tensor_parallel.block_shapes(hidden, hidden // 64), rng)
    given = {"params": {k: p.astype(np.float32) for k, p in params.items()}, "dtype": dtype, "repeats": 25}
    given["x"] = rng.normal(size=(1, tokens, hidden)).astype(np.float32)
    results, world = start.run(shards_in_turn, ranks=1, **given)
    return world, {"seconds": results[0], "hidden": hidden, "tokens": tokens, "dtype": dtype}


def pipeline_bubble(start: Start) -> Found:
    """The bubble of 1F1B over numbers of micro-batches of one batch (chapter 5)."""
    counts, ranks = (1, 2, 4, 8, 16), start.ranks
    parts = pipeline.split_layers(pipeline.residual_params(4 * ranks, 512), ranks)
    parts = [
        [[(w.astype(np.float32), b.astype(np.float32)) for w, b in chunk] for chunk in stage]
        for stage in parts
    ]
    x = np.random.default_rng(0).normal(size=(4096, 512)).astype(np.float32)
    results, world = start.run(
        pipeline.bubble_sweep, ranks=ranks, inputs=parts, x=x, target=0 * x, micro_batches=counts, repeats=9
    )
    seconds, idle = zip(*(pipeline.measured_bubble(one) for one in zip(*results)))
    return world, {"ranks": ranks, "micro_batches": counts, "seconds": seconds, "idle": idle}


def stages(start: Start) -> Found:
    """A training step in each of ZeRO's stages: its time, and what a rank holds (chapter 6)."""
    params = data_parallel.init_mlp((64, 1024, 1024, 1024, 10), dtype=np.float32)
    rng = np.random.default_rng(0)
    data = (rng.random((256, 64), dtype=np.float32), np.eye(10, dtype=np.float32)[rng.integers(0, 10, 256)])
    results, world = start.run(zero.time_stages, ranks=start.ranks, params=params, data=data, repeats=15)
    count = sum(a.size for a in data_parallel.leaves(params))
    seconds = collectives.quickest([r["seconds"] for r in results]).tolist()
    held, peak = results[0]["held"], results[0]["peak"]
    return world, {"ranks": start.ranks, "parameters": count, "seconds": seconds, "held": held, "peak": peak}


def both_at_once(comm: Comm, pair: tuple, repeats: int) -> dict[str, list[float]]:
    """Chapter 8's `overlap_trial` on this rank's own matrix and gradient."""
    return overlap.overlap_trial(comm, *pair, repeats=repeats)


def overlap_trial(start: Start) -> Found:
    """Products alone, an all-reduce alone, and both at once (chapter 8)."""
    width, numbers = (8192, 2**28) if start.gpu else (640, 2_000_000)
    rngs = [np.random.default_rng(r) for r in range(start.ranks)]
    ones = np.ones(numbers, np.float32)
    inputs = [(rng.normal(size=(width, width)).astype(np.float32) / width, ones) for rng in rngs]
    results, world = start.run(both_at_once, ranks=start.ranks, inputs=inputs, repeats=9)
    seconds = {name: float(collectives.quickest([[r[name]] for r in results])[0]) for name in results[0]}
    return world, {"ranks": start.ranks, "width": width, "gradient_bytes": 4 * numbers, "seconds": seconds}


def attention(start: Start) -> Found:
    """Ring, Ulysses and gathered attention, causal, both passes, for two cuts of the sequence (beyond 1)."""
    ranks, splits, heads, kv = start.ranks, ("contiguous", "zigzag"), 16, 8
    base, width, dtype = (8192 * min(ranks, 2), 128, "bfloat16") if start.gpu else (1024, 64, "float32")
    tokens = base // (2 * ranks) * 2 * ranks  # so that all parts are equal
    names = [name for name in long_context.CONTEXT_PARALLEL if name != "ulysses" or ranks <= kv]
    rng = np.random.default_rng(0)
    whole = [rng.normal(size=(1, n, tokens, width)).astype(np.float32) for n in (heads, kv, kv, heads)]
    given = {"whole": whole, "splits": splits, "names": names, "dtype": dtype, "repeats": 9}
    results, world = start.run(long_context.time_attention, ranks=ranks, **given)
    size = {"tokens": tokens, "heads": heads, "kv_heads": kv, "head_dim": width}
    sent = {
        name: long_context.attention_bytes(name, **size, ranks=ranks, itemsize=2 if start.gpu else 4)
        for name in names
    }
    quick = collectives.quickest([r["seconds"] for r in results]).reshape(len(splits), -1).tolist()
    return world, {
        **{"ranks": ranks, **size, "dtype": dtype, "bytes": sent},
        "seconds": {split: dict(zip(names, times)) for split, times in zip(splits, quick)},
        "pairs": dict(zip(splits, zip(*(r["pairs"] for r in results)))),
        "apart": max(max(r["apart"]) for r in results),
    }


def experts(start: Start) -> Found:
    """An expert-parallel layer, both passes, balanced and with a hot expert (beyond 2)."""
    ranks, each, k, hot = start.ranks, 4, 2, (0.0, 0.5, 0.75, 1.0)
    hidden, ffn, tokens, dtype = (2048, 8192, 8192, "bfloat16") if start.gpu else (256, 1024, 1024, "float32")
    tokens, hidden = tokens // (each * ranks) * each * ranks, max(hidden, each * ranks)
    rng = np.random.default_rng(0)
    shapes = mixture_of_experts.moe_shapes(hidden, ffn, each)
    # the same experts on every rank: it is about time
    params = {n: rng.normal(size=s).astype(np.float32) / s[-2] ** 0.5 for n, s in shapes.items()}
    params["router"] = np.eye(hidden, each * ranks, dtype=np.float32)
    batches = [mixture_of_experts.steered_tokens(tokens, hidden, each * ranks, k, share) for share in hot]
    given = {"params": params, "batches": batches, "k": k, "dtype": dtype, "repeats": 9}
    results, world = start.run(mixture_of_experts.time_experts, ranks=ranks, **given)
    size = {"tokens": tokens, "hidden": hidden, "ffn": ffn, "experts": each * ranks, "k": k}
    told = {name: list(zip(*(r[name] for r in results))) for name in ("rows", "bytes")}
    seconds = collectives.quickest([r["seconds"] for r in results]).tolist()
    return world, {"ranks": ranks, **size, "dtype": dtype, "hot": hot, "seconds": seconds, **told}


#: By the names that the chapters' cells give to `manyranks.results.recorded`.
CHAPTERS: dict[str, Callable[[Start], Found]] = {
    "01_machine_rates": machine_rates,
    "02_all_reduce_sweep": all_reduce_sweep,
    "03_weak_scaling": weak_scaling,
    "04_block_shards": block_shards,
    "05_pipeline_bubble": pipeline_bubble,
    "06_stages": stages,
    "08_overlap_trial": overlap_trial,
    "beyond_1_attention": attention,
    "beyond_2_experts": experts,
}


def under_torchrun(comm: Comm, gather: Callable[[Any], list[Any]], world: Callable[[int], str]) -> Start:
    """A `Start` within a run that torchrun has started: programs run on the first `ranks` of its ranks.

    All ranks call ``run``, and all get the results.
    """
    from manyranks.runtime.carry import from_torch, to_torch

    device = comm.world.device

    def run(
        program: Callable[..., Any], ranks: int, inputs: Sequence[Any] | None = None, **shared: Any
    ) -> tuple[list[Any], str]:
        members = comm if ranks == comm.size else comm.group(range(ranks))
        result = None
        if members is not None:
            given = () if inputs is None else (to_torch(inputs[comm.rank], device),)
            result = from_torch(program(members, *given, **to_torch(shared, device)))
        return gather(result)[:ranks], world(ranks)

    return Start(run, comm.size, device.type == "cuda")
