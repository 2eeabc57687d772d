"""Where a benchmark runs: its ranks, their devices, what carries their messages, and what rank 0 says."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyranks.runtime import Comm
from manyranks.runtime.backend import choose_backend, gpu_names

__all__ = ["BenchError", "Site", "check_surroundings", "choose_device", "under_torchrun"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class BenchError(Exception):
    """What the user asked for can't be run; the message says why and what to do."""


def under_torchrun() -> bool:
    """Whether torchrun (or something that sets the same variables) has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_surroundings(ranks: int | None) -> None:
    """Raise BenchError if the environment is half of what torchrun sets, or contradicts `ranks`."""
    if under_torchrun():
        missing = [name for name in _TORCHRUN if name not in os.environ]
        if missing:
            raise BenchError(
                f"RANK and WORLD_SIZE are set, but {', '.join(missing)} not. torchrun sets them all: "
                "torchrun --nproc-per-node=2 -m manyranks.bench all_reduce"
            )
        if ranks is not None and ranks != int(os.environ["WORLD_SIZE"]):
            raise BenchError(
                f"--ranks {ranks} is for a start without torchrun; torchrun has started "
                f"{os.environ['WORLD_SIZE']} ranks. Leave --ranks out"
            )
    elif int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_ID" in os.environ and ranks is None:
        raise BenchError(
            f"srun has started {os.environ['SLURM_NTASKS']} tasks without torchrun: each would be a world of its own. "
            "Start torchrun as one task a node (--ntasks-per-node=1); see the page on clusters"
        )


def choose_device(device: str, local_ranks: int, gpus: Sequence[str]) -> tuple[str, str]:
    """("cuda" or "cpu", why). With fewer GPUs than ranks on a node it is the CPU: NCCL takes one rank a GPU.

    >>> choose_device("auto", 2, ["H200"])
    ('cpu', 'gloo on CPU: 2 ranks on this node and 1 GPU, and NCCL takes one rank a GPU')
    >>> choose_device("auto", 2, ["H100", "H100"])
    ('cuda', 'NCCL: every rank has a GPU of its own')

    Raises: BenchError for "cuda" without a GPU for each of the node's ranks.
    """
    if device == "cpu":
        return "cpu", "gloo on CPU: --device cpu was asked for"
    have = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else "no GPU that PyTorch can use"
    ranks = f"{local_ranks} rank{'s' * (local_ranks != 1)}"
    if len(gpus) >= local_ranks:
        return "cuda", "NCCL: every rank has a GPU of its own"
    if device == "cuda":
        raise BenchError(
            f"--device cuda needs a GPU for each rank, and this node has {ranks} and {have} (NCCL would report a "
            f"duplicate GPU). Start at most {len(gpus)} a node, or take --device cpu"
        )
    if not gpus:
        return "cpu", f"gloo on CPU: {have}"
    return "cpu", f"gloo on CPU: {ranks} on this node and {have}, and NCCL takes one rank a GPU"


@dataclass
class Site:
    """One rank's view of the run.

    Attributes:
        comm: the communicator of all ranks, for the book's own programs.
        device: a torch.device; where this rank's tensors live.
        backend: "gloo" or "nccl".
        nodes: how many machines.
        note: why this device and backend.
        world: what it runs on, in words, as recordings say it.
        control: a gloo group for what isn't measured; None where the default group is gloo.
        out: where rank 0's lines go.
    """

    comm: Comm
    device: Any
    backend: str
    nodes: int
    note: str
    world: str
    control: Any
    out: Callable[[str], None]

    @classmethod
    def of(cls, comm: Comm, note: str) -> Site:
        """The site of a communicator that `launch` or `from_environment` made; torch.distributed is set up."""
        import torch
        import torch.distributed as dist

        inside = comm.world  # TorchComm's own knowledge of the process
        local = int(os.environ.get("LOCAL_WORLD_SIZE", comm.size))
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", max(1, comm.size // local)))
        names = gpu_names()[:local] * nodes if inside.device.type == "cuda" else []
        world = choose_backend(comm.size, names, inside.device.type).world
        if nodes > 1:
            head, _, rest = world.partition(",")
            world = f"{head} on {nodes} nodes,{rest}"
        control = dist.new_group(backend="gloo") if inside.backend == "nccl" and comm.size > 1 else None
        here = {
            "torch": torch.__version__,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if inside.backend == "nccl" else None,
            "device": inside.device.type,
        }
        site = cls(comm, inside.device, inside.backend, nodes, note, world, control, lambda line: None)
        if comm.rank == 0:
            site.out = lambda line: print(line, flush=True)
        for what, versions in zip(here, zip(*(tuple(h.values()) for h in site.gather(here)))):
            if len(set(versions)) > 1:
                site.say(
                    f"# warning: the ranks differ in {what}: {', '.join(map(str, sorted(set(map(str, versions)))))}"
                )
        return site

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def say(self, line: str = "") -> None:
        """Print a line, once for all ranks."""
        self.out(line)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        import torch.distributed as dist

        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def sync(self) -> None:
        """Wait until this rank's device has done what it was given."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for all ranks and their devices."""
        import torch.distributed as dist

        self.sync()
        if self.size > 1:
            dist.barrier(group=self.control)

    def time(self, work: Callable[[], Any], iterations: int, warmup: int) -> list[float]:
        """Seconds that one `work()` takes, by rank: the mean of `iterations` in a row after `warmup` more.

        The calls are started one after the other, and the device is waited for once, at the end; all ranks start
        together.
        """
        for _ in range(warmup):
            work()
        self.barrier()
        began = time.perf_counter()
        for _ in range(iterations):
            work()
        self.sync()
        return self.gather((time.perf_counter() - began) / iterations)

    def header(self) -> None:
        """Which rank sits where, as nccl-tests begin."""
        import torch

        device = "CPU"
        if self.device.type == "cuda":
            device = f"GPU {self.device.index} {torch.cuda.get_device_name(self.device)}"
        rows = self.gather((socket.gethostname(), os.getpid(), device))
        self.say(f"# {self.world}")
        self.say(f"# {self.note}")
        for rank, (host, pid, where) in enumerate(rows):
            self.say(f"#  Rank {rank:2d} Pid {pid:6d} on {host} {where}")
        self.say("#")
