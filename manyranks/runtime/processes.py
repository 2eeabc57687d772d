"""`launch`: the rank program on real processes, under torch.distributed.

What happens: the program and its arguments are pickled by value (`carry`); torchrun's elastic agent starts one process
a rank on this machine (`rank_process`); each makes a `TorchComm`, waits for the common start, runs the program and
leaves a report; this process watches the clock and the ranks' flight recorders (`supervisor`), and puts the reports
together into a `Run` (`gather`).
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from manyranks.runtime import backend, carry, rank_process
from manyranks.runtime.arguments import check_inputs, check_program
from manyranks.runtime.backend import choose_backend
from manyranks.runtime.comm import Comm
from manyranks.runtime.hardware import check_number
from manyranks.runtime.rank_process import Job
from manyranks.runtime.run import Run
from manyranks.runtime.supervisor import NotStarted, Supervisor

__all__ = ["choose_backend", "from_environment", "launch"]

_one_at_a_time = threading.RLock()


def launch(
    program: Callable[..., Any],
    ranks: int | None = None,
    inputs: Sequence[Any] | None = None,
    device: str = "auto",
    timeout: float = 60.0,
    record: bool = False,
    **shared: Any,
) -> Run:
    """Run `program` on real processes and say what it returned, how long it took and what it sent.

    Each rank calls ``program(comm, inputs[rank], **shared)``, or ``program(comm, **shared)`` without `inputs`, in a
    process of its own. NumPy arrays in the arguments (through lists, tuples and dicts) reach it as torch tensors on the
    rank's device; tensors in what it returns come back as NumPy arrays (bfloat16 by ml_dtypes, or as float32 without).

    Args:
        program: the rank program. It travels by value (cloudpickle): notebook cells and closures will do.
        ranks: how many processes; without it as many as `inputs`, or one for each GPU, at least 2.
        inputs: one argument for each rank.
        device: "cpu", "cuda", or "auto": GPUs where there are any. With a GPU for each rank, messages go over NCCL;
            if ranks share GPUs, through host memory and gloo, since NCCL takes one rank a GPU. `Run.world` and
            `Run.notes` say which it was.
        timeout: seconds from the ranks' start to the end of the last. Then all are ended, with `LaunchTimeout`.
        record: keep what ``comm.record`` is given.
        **shared: further arguments, the same on all ranks.

    What the ranks print is shown when they have ended, rank by rank, up to 1 MB of each stream of a rank. Each rank
    computes on one thread unless OMP_NUM_THREADS is set.

    Returns: a `Run`; its ``seconds`` are measured, from a common start to the end of the last rank.

    Raises:
        RankError: a rank raised, exited, died, or returned something that can't be pickled.
        LaunchTimeout: not done in time; says each rank's last communication call.
        CollectiveMismatchError: ranks of a group called different collectives, or one with different shapes.
        UnreceivedMessageError: a message was sent that nobody received, or a receive posted that nothing answered.
        ImportError: PyTorch is not installed.
        RuntimeError: called from within a rank program.
        ValueError, TypeError: arguments that make no sense, or that can't be pickled.

    >>> run = launch(lambda comm, x: comm.all_reduce(x), inputs=[np.ones(4), np.ones(4) * 2])  # doctest: +SKIP
    >>> run.results[0]                                                                         # doctest: +SKIP
    array([3., 3., 3., 3.])
    """
    check_program(program, inputs, shared)
    ranks = check_inputs(inputs, ranks)
    timeout = check_number("timeout", timeout, positive=True)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    if rank_process.inside:
        raise RuntimeError(
            "launch was called by a rank of a launch; make a group of its ranks instead (comm.group)"
        )
    backend.need_torch()
    with _one_at_a_time, _quiet():
        gpus = [] if device == "cpu" else backend.gpu_names()
        if ranks is None:
            ranks = max(2, len(gpus))
        place = choose_backend(ranks, gpus, device)
        method = backend.start_method(len(gpus))
        blobs = _pickled(program, inputs, shared)
        directory = Path(tempfile.mkdtemp(prefix="manyranks-"))
        try:
            job = Job(
                directory=str(directory), ranks=ranks, device=place.device, backend=place.backend, gpus=len(gpus),
                timeout=timeout, record=record, parent=os.getpid(), loopback=backend.loopback(), program=blobs[0], inputs=blobs[1],
            )  # fmt: skip
            try:
                return Supervisor(job, method, place).run()
            except NotStarted:
                return Supervisor(job, "spawn", place).run()
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def from_environment(timeout: float = 600.0) -> Comm:
    """The communicator of a script that torchrun started: ``torchrun --nproc-per-node 2 script.py``.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and calls `init_process_group`
    (end with ``torch.distributed.destroy_process_group()``). Works across nodes. Other than under `launch`, nobody
    watches the ranks: mismatched collectives hang until `timeout` (seconds).

    Raises: RuntimeError if the process was not started by torchrun.
    """
    backend.need_torch()
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not set: start the script with torchrun, or use `launch`")
    import torch

    from manyranks.runtime.torch_comm import TorchComm

    atexit.register(time.sleep, 0.1)  # see `leave`; for scripts that end as scripts do
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    carrier = "nccl" if gpus >= local else "gloo"
    timeout = check_number("timeout", timeout, positive=True)
    world = backend.connect(rank, size, "cuda" if gpus else "cpu", carrier, gpus, timeout)
    return TorchComm(world, tuple(range(size)), 0, world.main, 0)


def leave(status: int) -> NoReturn:
    """End this process, one that torchrun started, at once and with `status`.

    When Python ends by itself, a thread of gloo's may still be dropping the tensors of its last collective; it then asks
    for an interpreter that is gone, and the process aborts although all its work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _pickled(program: Any, inputs: Any, shared: dict[str, Any]) -> tuple[bytes, list[bytes] | None]:
    try:
        blob = carry.dumps((program, shared), "program", like=program)
    except TypeError:
        carry.dumps(
            program, f"program ({getattr(program, '__name__', type(program).__name__)})", like=program
        )
        for name, value in shared.items():
            carry.dumps(value, f"the argument {name}", like=program)
        raise
    if inputs is None:
        return blob, None
    return blob, [carry.dumps(inputs[r], f"inputs[{r}]", like=program) for r in range(len(inputs))]


@contextmanager
def _quiet() -> Iterator[None]:
    """No banners of the agent, no warning of a fork beside threads, and an environment that is as it was."""
    import torch.distributed.launcher.api  # noqa: F401  so that its loggers exist

    kept = {
        name: os.environ.get(name)
        for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "PYTORCH_NVML_BASED_CUDA_CHECK")
    }
    logging.getLogger("torchelastic-events-null")
    loggers = [
        logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and not logger.disabled
        and name.startswith(("torch.distributed", "torch.multiprocessing", "torchelastic"))
    ]  # fmt: skip
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for GPUs must not start CUDA here
    try:
        for logger in loggers:
            logger.disabled = True
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
            )
            yield
    finally:
        for logger in loggers:
            logger.disabled = False
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
