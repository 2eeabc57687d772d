"""How fast the simulator is, beside simpy and beside plain threads.

    python -m benchmarks            # all, about five minutes; writes book/benchmarks.md and results/benchmarks.json
    python -m benchmarks --quick    # small sizes, seconds; prints only

What is compared is measured in turn, in one process, several times; a ratio is the median of the ratios of the
repetitions. Rates are per second of processor time, which other processes disturb less than the clock on the wall.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import models
from manyranks import Cluster, simulate
from manyranks.runtime import machine

ROOT = Path(__file__).parents[1]
NBYTES = 64  # of one message of the ring
ALPHA, BETA = 1e-6, 100e9

NAMES = {
    "manyranks": "manyranks, arrays",
    "manyranks_phantom": "manyranks, phantoms",
    "simpy_lean": "simpy, ports as numbers",
    "simpy_resources": "simpy, ports as resources",
    "threads": "threads and queues (no clock)",
}


def _cpu(function: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.process_time()
    out = function()
    return time.process_time() - began, out


def rates(ranks: int, messages: int, repeats: int) -> dict[str, Any]:
    """Messages per second of processor time in a ring, for each of `NAMES`, and how many times simpy's that is."""
    steps = max(1, messages // ranks)
    cluster = Cluster.flat(ranks, latency=ALPHA, bandwidth=BETA)
    arrays, imagined = np.ones(NBYTES, np.uint8), models.phantom_of(NBYTES)
    runs = {
        "manyranks": lambda: simulate(models.ring, cluster=cluster, x=arrays, steps=steps).seconds,
        "manyranks_phantom": lambda: simulate(models.ring, cluster=cluster, x=imagined, steps=steps).seconds,
        "simpy_lean": lambda: models.simpy_lean(ranks, steps, NBYTES, ALPHA, BETA),
        "simpy_resources": lambda: models.simpy_resources(ranks, steps, NBYTES, ALPHA, BETA),
        "threads": lambda: models.threads(ranks, steps, NBYTES),
    }
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        clocks = {}
        for name, run in runs.items():
            seconds, clocks[name] = _cpu(run)
            took[name].append(seconds)
        del clocks["threads"]
        if len(set(clocks.values())) != 1:
            raise AssertionError(f"the virtual clocks differ, so these are not the same model: {clocks}")
    sent = steps * ranks
    return {
        "ranks": ranks,
        "messages": sent,
        "virtual_seconds": clocks["manyranks"],
        "messages_per_second": {name: sent / statistics.median(t) for name, t in took.items()},
        "times_simpy": {
            base: statistics.median(b / a for a, b in zip(took["manyranks"], took[base]))
            for base in ("simpy_lean", "simpy_resources")
        },
    }


def probe(*arguments: Any, repeats: int = 1) -> dict[str, float]:
    """The median of each figure over `repeats` fresh processes."""
    command = [sys.executable, "-m", "benchmarks.probe", *map(str, arguments)]
    found = [json.loads(subprocess.check_output(command, cwd=ROOT)) for _ in range(repeats)]
    return {key: statistics.median(f[key] for f in found) for key in found[0]}


def measure(quick: bool) -> dict[str, Any]:
    sizes, messages, repeats = ((8, 64), 2_000, 1) if quick else ((8, 64, 1024), 40_000, 7)
    large, payload = (512, 14_000_000) if quick else (16_384, 14_000_000_000)
    even = payload // (2 * large) * 2 * large
    return {
        "name": "benchmarks",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("greenlet", "simpy", "numpy")},
        "message_bytes": NBYTES,
        "repeats": repeats,
        "rates": [rates(n, messages, repeats) for n in sizes],
        "all_reduce": [
            {"cluster": cluster, "ranks": large, "bytes": nbytes,
             **probe("all_reduce", cluster, large, nbytes, repeats=min(repeats, 5))}
            for cluster in ("flat", "nodes") for nbytes in (payload, even)
        ],
        "memory": [{"ranks": large, "messages": k, **probe("memory", large, k)} for k in (0, 10)],
        "iteration": [
            {"micro_batches": m, **probe("iteration", m, repeats=min(repeats, 5))}
            for m in ((64,) if quick else (64, 512))
        ],
        "planner": [
            {"gpus": gpus, **probe("planner", gpus, repeats=min(repeats, 5))}
            for gpus in ((64,) if quick else (64, 128, 1024))
        ],
    }  # fmt: skip


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _times(x: float) -> str:
    return f"{x:.1f} ×"


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The figures as Markdown."""
    rows = [
        [NAMES[name], *(f"{r['messages_per_second'][name]:,.0f}" for r in found["rates"])] for name in NAMES
    ]
    rows += [
        [f"manyranks to {NAMES[base]}", *(_times(r["times_simpy"][base]) for r in found["rates"])]
        for base in ("simpy_lean", "simpy_resources")
    ]
    head = ["messages a second", *(f"{r['ranks']:,} ranks" for r in found["rates"])]
    rings = [
        [
            "flat" if r["cluster"] == "flat" else f"{r['ranks'] // 8:,} nodes of 8 H100",
            f"{r['bytes']:,}",
            "yes" if r["bytes"] // 2 % r["ranks"] == 0 else "no",
            f"{r['messages']:,.0f}",
            f"{r['virtual_seconds']:.4f} s",
            f"{r['cpu_seconds']:.2f} s",
        ]
        for r in found["all_reduce"]
    ]
    memory = [
        [f"{r['messages']} messages sent", f"{r['bytes_per_rank'] / 1e3:.1f} kB"] for r in found["memory"]
    ]
    iterations = [
        [
            f"{r['micro_batches']} micro-batches",
            f"{r['messages']:,.0f}",
            f"{r['virtual_seconds']:.1f} s",
            f"{r['cpu_seconds']:.2f} s",
            f"{r['wall_seconds']:.2f} s",
        ]
        for r in found["iteration"]
    ]
    plans = [
        [
            f"{r['gpus']:,} GPUs",
            f"{r['plans']:,.0f}",
            f"{r['cpu_seconds']:.2f} s",
            f"{r['plans_per_second']:,.0f}",
        ]
        for r in found["planner"]
    ]
    return {
        "planner": _table(["175B on", "plans", "processor time", "plans a second"], plans),
        "iteration": _table(["a step of", "messages", "predicted", "processor time", "time"], iterations),
        "rates": _table(head, rows),
        "rings": _table(["network", "bytes", "divisible", "messages", "predicted", "processor time"], rings),
        "memory": _table(["a rank that waits, after", "memory a rank"], memory),
    }


PAGE = """<!-- Generated by `python -m benchmarks`; edit benchmarks/__main__.py instead. -->
# Benchmarks

How fast the simulator is, and what a rank costs. Measured on {date}: {cpu}, {cores} cores, {os}, Python {python},
NumPy {numpy}, greenlet {greenlet}, simpy {simpy}. To measure on your machine:

```sh
python -m benchmarks
```

What is compared runs in turn in one process, {repeats} times, and the medians are shown; a ratio is the median of the
repetitions' ratios. Rates count seconds of processor time. The figures are in `results/benchmarks.json`.

## Messages

A ring: each rank sends {message_bytes} bytes to the right, receives from the left, and does it again. Every message takes its
turn on an out port and on an in port and is logged with its times. All four models with a clock give the same virtual
time to the bit; the benchmark stops if they don't. Both simpy models are in `benchmarks/models.py`: one written as
simpy's manual teaches it, with a `Resource` for a port and a process for a message, and one written for speed, in which
a port is the time at which it is free next. The threads move the messages and keep no time.

{rates}

## A ring all-reduce on {large:,} ranks

In a fresh process, without its start and imports. The payload is a phantom, so nothing but time is computed. "Divisible"
says whether the ranks divide the elements: then all chunks are equal, and ranks that behave alike are timed once.

{rings}

## A training step of a trillion parameters

The largest run of Narayanan et al. (2021): 1T parameters on 3,072 GPUs, tensor 8, pipeline 64, data 6, 1F1B. Instruction by
instruction and message by message, in a fresh process; one rank stands for the 48 that do the same at the same time
(`manyranks.iteration.simulate_plan`). The published run has 512 micro-batches.

{iteration}

## Plans

Every plan of chapter 7's planner for a job of 175 billion parameters, enumerated, with its memory on each end of the
pipeline and its step by parts, on one core. The goal is 5,000 plans a second. Calculon, which predicts in more detail,
was measured at about 480 on a core of the same kind.

{planner}

## Memory

Resident memory divided by the ranks, while all but one of {large:,} ranks wait. The log of messages and the timeline grow
with what is sent.

{memory}
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, print only")
    found = measure(parser.parse_args().quick)
    made = tables(found)
    print("\n\n".join(made.values()))
    if found["repeats"] == 1:
        return
    told = {**found["machine"], **found["versions"], **made}
    large = found["all_reduce"][0]["ranks"]
    page = PAGE.format(**told, large=large, **{k: found[k] for k in ("date", "repeats", "message_bytes")})
    (ROOT / "book" / "benchmarks.md").write_text(page, encoding="utf-8")
    (ROOT / "results").mkdir(exist_ok=True)
    (ROOT / "results" / "benchmarks.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
