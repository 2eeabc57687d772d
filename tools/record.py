"""Run the chapters' hardware programs on this machine and keep the figures in `results/`.

    python tools/record.py                      # everything, on the GPUs if there are any, otherwise on CPU
    python tools/record.py 02 --ranks 4         # one chapter
    python tools/record.py --device cpu

A program is launched, its figures are written with the machine, the versions and the date, and the chapter's cells
show them the next time they run (`make refresh`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from manyranks import collectives, data_parallel, launch, memory, pipeline, tensor_parallel, zero
from manyranks.results import record
from manyranks.runtime import Comm, machine


def chapter_01(ranks: int, device: str) -> None:
    """What a rank reaches: a matrix product, a training step, a copy."""
    n = 8192 if device != "cpu" and machine()["gpus"] else 1024
    matrix = np.random.default_rng(0).normal(size=(n, n)).astype(np.float32)
    run = launch(memory.machine_rates, ranks=ranks, device=device, timeout=300.0, x=matrix, repeats=9)
    print(record("01_machine_rates", run.world, ranks=ranks, matrix=n, rates=run.results).name)


def chapter_02(ranks: int, device: str) -> None:
    """All-reduce over message sizes: our ring, and the backend's own."""
    lengths = [4**k for k in range(4, 12)]
    buffer = np.ones(max(lengths), dtype=np.float32)
    seconds = {}
    for algorithm in ("ours", "auto"):
        run = launch(
            collectives.all_reduce_sweep, ranks=ranks, device=device, timeout=300.0, buffer=buffer, lengths=lengths,
            repeats=21, algorithm=algorithm,
        )  # fmt: skip
        seconds[algorithm] = collectives.quickest(run.results).tolist()
    print(record("02_all_reduce_sweep", run.world, ranks=ranks, sizes=[4 * n for n in lengths], seconds=seconds).name)


def chapter_03(ranks: int, device: str) -> None:
    """Weak scaling: steps of the same work per rank on 1, 2, 4, ... ranks, and the gradient's all-reduce alone."""
    params = data_parallel.init_mlp((64, 512, 512, 10), dtype=np.float32)
    rng = np.random.default_rng(0)
    data = (rng.random((1024, 64), dtype=np.float32), np.eye(10, dtype=np.float32)[rng.integers(0, 10, 1024)])
    steps, all_reduces, world = {}, {}, ""
    for n in sorted({1, ranks} | {2**k for k in range(1, ranks.bit_length()) if 2**k < ranks}):
        run = launch(
            data_parallel.time_steps, ranks=n, device=device, timeout=300.0, params=params, data=data, repeats=25
        )
        steps[n], all_reduces[n] = collectives.quickest(run.results).tolist()
        world = run.world
    print(record("03_weak_scaling", world, ranks=ranks, batch_per_rank=1024, steps=steps, all_reduces=all_reduces).name)


def shards_in_turn(comm: Comm, params: dict, x: np.ndarray, dtype: str, repeats: int) -> dict[str, float]:
    """Seconds of one shard of t, without communication, for each t. In turn, so that all meet the same other work."""
    best = {t: float("inf") for t in (1, 2, 4, 8)}
    for _ in range(repeats):
        for t in best:
            part = tensor_parallel.shard(params, 0, t)
            best[t] = min(best[t], *tensor_parallel.time_block(comm, part, x, 2, dtype))
    return {str(t): seconds for t, seconds in best.items()}


def chapter_04(ranks: int, device: str) -> None:
    """A transformer block's forward and backward: one shard of 1, 2, 4 and 8 on one device."""
    gpu = device != "cpu" and bool(machine()["gpus"])
    hidden, tokens, dtype = (4096, 2048, "bfloat16") if gpu else (512, 256, "float32")
    rng = np.random.default_rng(0)
    params = tensor_parallel.initial(tensor_parallel.block_shapes(hidden, hidden // 64), rng)
    given = {"params": {k: p.astype(np.float32) for k, p in params.items()}, "dtype": dtype, "repeats": 25}
    given["x"] = rng.normal(size=(1, tokens, hidden)).astype(np.float32)
    run = launch(shards_in_turn, ranks=1, device=device, timeout=300.0, **given)
    shape = {"hidden": hidden, "tokens": tokens, "dtype": dtype}
    print(record("04_block_shards", run.world, seconds=run.results[0], **shape).name)


def chapter_05(ranks: int, device: str) -> None:
    """The bubble of 1F1B over numbers of micro-batches of one batch."""
    counts = (1, 2, 4, 8, 16)
    parts = pipeline.split_layers(pipeline.residual_params(4 * ranks, 512), ranks)
    parts = [[[(w.astype(np.float32), b.astype(np.float32)) for w, b in chunk] for chunk in stage] for stage in parts]
    x = np.random.default_rng(0).normal(size=(4096, 512)).astype(np.float32)
    run = launch(
        pipeline.bubble_sweep, inputs=parts, device=device, timeout=300.0, x=x, target=0 * x, micro_batches=counts, repeats=9
    )
    seconds, idle = zip(*(pipeline.measured_bubble(results) for results in zip(*run.results)))
    print(record("05_pipeline_bubble", run.world, ranks=ranks, micro_batches=counts, seconds=seconds, idle=idle).name)


def chapter_06(ranks: int, device: str) -> None:
    """A training step in each of ZeRO's stages: its time, and what a rank holds."""
    params = data_parallel.init_mlp((64, 1024, 1024, 1024, 10), dtype=np.float32)
    rng = np.random.default_rng(0)
    data = (rng.random((256, 64), dtype=np.float32), np.eye(10, dtype=np.float32)[rng.integers(0, 10, 256)])
    run = launch(zero.time_stages, ranks=ranks, device=device, timeout=300.0, params=params, data=data, repeats=15)
    count = sum(a.size for a in data_parallel.leaves(params))
    seconds = collectives.quickest([r["seconds"] for r in run.results]).tolist()
    held, peak = run.results[0]["held"], run.results[0]["peak"]
    print(record("06_stages", run.world, ranks=ranks, parameters=count, seconds=seconds, held=held, peak=peak).name)


CHAPTERS: dict[str, Callable[[int, str], None]] = {
    "01": chapter_01,
    "02": chapter_02,
    "03": chapter_03,
    "04": chapter_04,
    "05": chapter_05,
    "06": chapter_06,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapters", nargs="*", choices=[*CHAPTERS, []], help="chapter numbers; all without any")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args()
    for chapter in options.chapters or CHAPTERS:
        CHAPTERS[chapter](options.ranks, options.device)


if __name__ == "__main__":
    main()
