"""Where ranks run and what carries their messages: GPUs, backends, start methods, the process group."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from manyranks.runtime.flight import FlightRecorder
from manyranks.runtime.hardware import machine

__all__ = ["Placement", "choose_backend", "connect", "gpu_names", "loopback", "need_torch", "start_method"]


@dataclass(frozen=True)
class Placement:
    """Where ranks run and what carries their messages."""

    device: str  # "cpu" or "cuda"
    backend: str  # "gloo" or "nccl"
    world: str  # in words
    note: str  # why


def choose_backend(ranks: int, gpus: Sequence[str], device: str = "auto") -> Placement:
    """Device and backend for so many ranks on GPUs of these names. Raises ValueError for "cuda" without a GPU.

    >>> choose_backend(4, []).world
    '4 processes, gloo on CPU'
    >>> choose_backend(2, ["H200"]).world
    '2 processes sharing 1 GPU (H200), gloo through host memory'
    >>> choose_backend(8, ["H100"] * 8).world
    '8 processes, NCCL on 8 GPUs (H100)'
    """
    processes = f"{ranks} process{'es' * (ranks != 1)}"
    if device == "cuda" and not gpus:
        raise ValueError(
            "device='cuda' needs a GPU that PyTorch can use, and there is none; take 'auto' or 'cpu'"
        )
    if device == "cpu" or not gpus:
        why = "device='cpu' was asked for" if device == "cpu" else "no GPU that PyTorch can use"
        return Placement("cpu", "gloo", f"{processes}, gloo on CPU", f"gloo on CPU: {why}")
    names = ", ".join(sorted(set(gpus[:ranks])))
    if len(gpus) >= ranks:
        on = f"{ranks} GPU{'s' * (ranks != 1)} ({names})"
        return Placement(
            "cuda", "nccl", f"{processes}, NCCL on {on}", "NCCL: every rank has a GPU of its own"
        )
    on = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)} ({names})"
    return Placement(
        "cuda",
        "gloo",
        f"{processes} sharing {on}, gloo through host memory",
        f"gloo through host memory: {ranks} ranks share {on}, and NCCL takes one rank a GPU. Communication times are "
        "those of host memory, not of a GPU's links",
    )


def need_torch() -> None:
    try:
        import torch.distributed  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "launch needs PyTorch, which is not installed: pip install 'manyranks[torch]'"
        ) from error


def gpu_names() -> list[str]:
    """The names of the GPUs that PyTorch can use, without starting CUDA in this process."""
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    names = [gpu["name"].removeprefix("NVIDIA ").removeprefix("Tesla ") for gpu in machine()["gpus"]]
    return names[:count] + ["GPU"] * (count - len(names))


def start_method(gpus: int) -> str:
    """ "fork" where a copy of this process will work, "spawn" where it might not.

    A fork inherits no CUDA context that works, and no OpenMP threads that work: with OMP_NUM_THREADS above 1 it would
    hang in the first parallel loop. On macOS system libraries don't survive a fork.
    """
    import torch

    if not sys.platform.startswith("linux") or os.environ.get("OMP_NUM_THREADS", "1").split(",")[0] != "1":
        return "spawn"
    if torch.cuda.is_initialized():
        return "spawn"
    if gpus:  # whether CUDA was touched can only be seen from the other side of a fork
        pid = os.fork()
        if pid == 0:
            os._exit(1 if torch.cuda._is_in_bad_fork() else 0)
        if os.waitpid(pid, 0)[1] != 0:
            return "spawn"
    return "fork"


def loopback() -> str | None:
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    return next((name for name in ("lo", "lo0", *names) if name in names and name.startswith("lo")), None)


def connect(
    rank: int,
    size: int,
    device: str,
    backend: str,
    gpus: int,
    timeout: float,
    recorder: FlightRecorder | None = None,
    record: bool = False,
) -> Any:
    """Join the process group that the environment describes. Returns this process's `World`."""
    import torch
    import torch.distributed as dist

    from manyranks.runtime.torch_comm import World

    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    on = torch.device("cpu")
    options: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        on = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(on)
        if backend == "nccl":
            assert local_rank < gpus, f"one GPU a rank: local rank {local_rank}, {gpus} GPUs"
            options = {"backend": "cpu:gloo,cuda:nccl", "device_id": on}
    store, _, _ = next(iter(dist.rendezvous("env://", rank=rank, world_size=size)))
    # Longer than the run may take, so that a hang is told by the launching process, which sees all ranks.
    longer = timedelta(seconds=timeout + 60)
    store.set_timeout(longer)
    dist.init_process_group(
        store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=longer, **options
    )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return World(rank, size, on, backend, dist.PrefixStore("manyranks", store), local_size, recorder, record)
