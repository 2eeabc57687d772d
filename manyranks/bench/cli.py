"""The command line of `python -m manyranks.bench`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyranks.bench import chapters, collectives, steps
from manyranks.bench.site import BenchError, Site, check_surroundings, choose_device, under_torchrun
from manyranks.results import FOLDER, record

__all__ = ["BENCHES", "main", "parser"]

Bench = Callable[[Site, dict[str, Any]], dict[str, Any]]

BENCHES: dict[str, Bench] = {
    **{name: collectives.collective for name in collectives.COLLECTIVES},
    "point_to_point": collectives.point_to_point,
    "tensor_parallel": steps.tensor_parallel,
    "ddp": steps.ddp,
    "fsdp": steps.fsdp,
    "pipeline": steps.pipeline,
}

EPILOG = """\
names
  all_reduce all_gather reduce_scatter broadcast reduce all_to_all
                        collectives, in nccl-tests' columns. size is one rank's buffer in all_reduce, broadcast and
                        reduce, and the total of all ranks' parts in the others. algbw = size / time;
                        busbw = algbw x 2(n-1)/n for all_reduce, x (n-1)/n for all_gather, reduce_scatter and
                        all_to_all, x 1 for broadcast and reduce. #wrong is counted on fresh data after timing.
  point_to_point        half a round trip, bandwidth one way, and each way when both send; fits alpha and beta
  tensor_parallel       forward and backward of blocks split column then row (DTensor)
  ddp fsdp              a step of DistributedDataParallel, of fully_shard
  pipeline              steps of torch.distributed.pipelining, GPipe and 1F1B
  01_machine_rates 02_all_reduce_sweep 03_weak_scaling 04_block_shards 05_pipeline_bubble 06_stages 08_overlap_trial
  beyond_1_attention beyond_2_experts
                        the chapters' own programs; what is recorded appears in the chapter's cell

FLOP/s of the steps count the model's matrix products only: 24 T h^2 + 4 T s h a block and forward pass, of T tokens,
hidden size h and sequence s; the backward pass twice that; nothing for norms, optimizer or recomputation.

examples
  torchrun --nproc-per-node=8 -m manyranks.bench all_reduce -b 8 -e 1G -f 2
  torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --rdzv-id=bench \\
      -m manyranks.bench fsdp --record                                  # on both machines
  python -m manyranks.bench point_to_point --ranks 2 --device cpu
"""


def _size(text: str) -> int:
    try:
        return collectives.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, got {text!r}")
        return value

    return number


def parser() -> argparse.ArgumentParser:
    """All options; `--help` prints them."""
    one, zero = _at_least(1), _at_least(0)
    p = argparse.ArgumentParser(
        prog="python -m manyranks.bench",
        usage="torchrun --nproc-per-node=N -m manyranks.bench NAME [options]\n"
        "       python -m manyranks.bench NAME --ranks N [options]",
        description="Measure communication and parallel training steps on this machine or this cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("name", metavar="NAME", help="what to measure; see below")
    p.add_argument("--ranks", type=one, help="without torchrun: how many processes to start here (default 1)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                   help="auto takes GPUs if every rank has one of its own (default)")  # fmt: skip
    p.add_argument(
        "--record", action="store_true", help="keep the figures as JSON, with machine, versions and date"
    )
    p.add_argument(
        "--results", type=Path, default=FOLDER, metavar="FOLDER", help="where --record writes (results/)"
    )
    p.add_argument("--timeout", type=one, default=600, help="seconds after which the run is given up (600)")
    p.add_argument("-n", "--iters", dest="iterations", type=one, default=20, help="timed iterations (20)")
    p.add_argument("-w", "--warmup", type=zero, default=5, help="iterations before those (5)")
    g = p.add_argument_group("collectives and point_to_point")
    g.add_argument(
        "-b",
        "--minbytes",
        dest="begin",
        type=_size,
        default=8,
        help="smallest size (8); K, M, G are of 1,024",
    )
    g.add_argument("-e", "--maxbytes", dest="end", type=_size, default=None,
                   help="largest size (128M on GPUs, 16M on CPU)")  # fmt: skip
    g.add_argument(
        "-f", "--stepfactor", dest="factor", type=float, default=2.0, help="factor between sizes (2)"
    )
    g.add_argument("-d", "--datatype", dest="dtype", choices=tuple(collectives.DTYPES), default="float")
    g.add_argument("-o", "--op", choices=tuple(collectives.OPS), default="sum")
    g.add_argument("-r", "--root", type=zero, default=0, help="of broadcast and reduce (0)")
    g.add_argument("-c", "--check", type=int, choices=(0, 1), default=1, help="count wrong elements (1)")
    g.add_argument("--peer", type=one, help="rank 0's partner in point_to_point (the last rank)")
    g = p.add_argument_group("steps", "sizes not given depend on the device")
    g.add_argument("--layers", type=one, help="transformer blocks")
    g.add_argument("--hidden", type=one, help="hidden size h (4096 on GPUs, 256 on CPU)")
    g.add_argument("--heads", type=one, help="attention heads (h / 64)")
    g.add_argument("--seq", dest="sequence", type=one, help="sequence length s (2048, 128)")
    g.add_argument("--batch", type=one, help="sequences a rank; in a pipeline, of the whole batch")
    g.add_argument(
        "--step-dtype", choices=("float32", "float16", "bfloat16"), help="(bfloat16 on GPUs, float32 on CPU)"
    )
    g.add_argument(
        "--micro-batches", type=one, nargs="+", default=[1, 2, 4, 8], help="of the pipeline (1 2 4 8)"
    )
    return p


def program(comm: Any, options: dict[str, Any], note: str) -> dict[str, Any]:
    """One bench on the ranks of `comm`; a rank program. Returns what rank 0 would record."""
    site = Site.of(comm, note)
    if options["end"] is None:
        options = {**options, "end": 2**27 if site.device.type == "cuda" else 2**24}
    return {
        "world": site.world,
        "nodes": site.nodes,
        "ranks": site.size,
        **BENCHES[options["name"]](site, options),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says. Returns the exit status: 0, 1 for wrong results, 2 for a wrong command."""
    options = vars(parser().parse_args(argv))
    speaks = os.environ.get("RANK", "0") == "0"
    known = {**BENCHES, **chapters.CHAPTERS}
    try:
        name = options["name"]
        if name not in known:
            raise BenchError(f"no bench is named {name!r}; there are {', '.join(known)}")
        if options["end"] is not None:  # so that a wrong range is told before anything starts
            list(collectives.sizes(options["begin"], options["end"], options["factor"]))
        check_surroundings(options["ranks"])
        found = _under_torchrun(options) if under_torchrun() else _started_here(options)
    except (BenchError, ValueError) as error:
        if speaks:
            print(f"manyranks.bench: {error}", file=sys.stderr)
        return 2
    if speaks and options["record"]:
        world = found.pop("world")
        entry = name if name in chapters.CHAPTERS else f"bench_{name}"
        path = record(entry, world, folder=options["results"], **found)
        print(f"# recorded: {path.name}")
    elif speaks and name in chapters.CHAPTERS:
        print(f"# {found['world']}: {found}")
    return 1 if found.get("wrong") else 0


def _under_torchrun(options: dict[str, Any]) -> dict[str, Any]:
    """This process is one rank of many."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    device, note = choose_device(options["device"], local, _gpus(options["device"]))
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when CUDA starts, which it has not yet
    import torch.distributed as dist

    from manyranks.runtime.processes import from_environment

    comm = from_environment(timeout=options["timeout"])
    try:
        if options["name"] in BENCHES:
            return program(comm, options, note)
        site = Site.of(comm, note)
        whole = site.world

        def world(ranks: int) -> str:
            if ranks == comm.size:
                return whole
            return (
                f"{ranks} process{'es' * (ranks != 1)}, {'NCCL' if site.backend == 'nccl' else 'gloo on CPU'}"
            )

        site.header()
        world_text, found = chapters.CHAPTERS[options["name"]](
            chapters.under_torchrun(comm, site.gather, world)
        )
        return {"world": world_text, **({"nodes": site.nodes} if site.nodes > 1 else {}), **found}
    finally:
        dist.destroy_process_group()


def _started_here(options: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks on this machine with the package's own launch."""
    from manyranks.runtime.errors import RankError
    from manyranks.runtime.processes import launch

    ranks = options["ranks"] or 1
    device, note = choose_device(options["device"], ranks, _gpus(options["device"]))
    given = {"device": device, "timeout": float(options["timeout"])}
    if options["name"] in chapters.CHAPTERS:
        return chapter(options["name"], ranks, options["device"], given["timeout"])
    try:
        run = launch(program, ranks=ranks, options=options, note=note, **given)
    except RankError as error:
        if "BenchError: " in str(error):
            raise BenchError(str(error).split("BenchError: ", 1)[1].split("\n", 1)[0]) from None
        raise
    return run.results[0]


def chapter(name: str, ranks: int, device: str, timeout: float = 600.0) -> dict[str, Any]:
    """Run a chapter's program with `launch`; returns its figures and, under "world", what it ran on."""
    from manyranks.runtime.processes import launch

    def run(
        program: Callable[..., Any], ranks: int, inputs: Any = None, **shared: Any
    ) -> tuple[list[Any], str]:
        done = launch(program, ranks=None if inputs is not None else ranks, inputs=inputs, device=device, timeout=timeout,
                      **shared)  # fmt: skip
        return done.results, done.world

    gpu = device != "cpu" and bool(_gpus(device))
    world, found = chapters.CHAPTERS[name](chapters.Start(run, ranks, gpu))
    return {"world": world, **found}


def _gpus(device: str) -> list[str]:
    from manyranks.runtime.backend import gpu_names, need_torch

    need_torch()
    return [] if device == "cpu" else gpu_names()
