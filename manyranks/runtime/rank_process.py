"""One rank of `launch`: from the process's first line to its report.

torchrun's agent starts it in one of two ways. Forked, it is a copy of the launching process and takes the job from
memory. Spawned, it is a new Python that runs this file and reads the job from files. Either way it ends with a report
on disk (a result, or what went wrong); what it prints goes to two files.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyranks.runtime.flight import FlightRecorder

__all__ = ["Job", "Report", "main"]

inside = False  # whether this process is a rank


@dataclass
class Job:
    """What all ranks need to know."""

    directory: str
    ranks: int
    device: str  # "cpu" or "cuda"
    backend: str  # "gloo" or "nccl"
    gpus: int
    timeout: float  # seconds
    record: bool
    parent: int  # pid of the launching process
    loopback: str | None
    program: bytes = b""  # (program, shared)
    inputs: list[bytes] | None = None
    path: list[str] = field(default_factory=list)
    sources: dict[str, tuple] = field(default_factory=dict)


@dataclass
class Report:
    """What a rank leaves behind."""

    rank: int
    time: float  # perf_counter
    error: str = ""  # summary; "" if all went well
    traceback: str = ""
    follows: bool = False  # the error only says that another rank is gone
    mismatch: bool = False
    result: bytes = b""
    start: float = 0.0
    end: float = 0.0
    sent: list = field(default_factory=list)
    arrived: list = field(default_factory=list)
    nominal: list = field(default_factory=list)
    waits: list = field(default_factory=list)
    labels: list = field(default_factory=list)
    records: list = field(default_factory=list)
    calls: dict = field(default_factory=dict)
    unanswered: list = field(default_factory=list)


def main(job: Job) -> None:
    """Run this process's rank. Does not return if the program fails."""
    global inside
    inside = True
    rank = int(os.environ["RANK"])
    directory = Path(job.directory)
    recorder = FlightRecorder(directory / f"flight-{rank}")
    recorder.begin()
    _settle(job, rank)
    threading.Thread(target=_watch_parent, args=(job.parent, job.directory), daemon=True).start()
    report = _run(job, rank, recorder)
    sys.stdout.flush()
    sys.stderr.flush()
    part = directory / f"report-{rank}.part"
    with open(part, "wb") as file:
        pickle.dump(report, file, protocol=5)
    part.rename(directory / f"report-{rank}")
    if report.error:
        if report.follows:
            time.sleep(5)  # the rank that this one lost has the better story: let it be found first
        os._exit(1)
    # Leave without waiting for threads and exit handlers that the program may have left behind.
    from multiprocessing import util

    util.Finalize(None, os._exit, args=(0,), exitpriority=1000)


def _settle(job: Job, rank: int) -> None:
    """Make the process a rank: own process group, default signals, own output, one thread."""
    if os.getpgrp() != os.getpid():
        os.setsid()
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launching process, which ends the ranks
    if os.getppid() != job.parent:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{job.directory}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        os.close(file)
        raw = io.FileIO(fd, "w", closefd=False)
        # A line is written at once, so that nothing is lost if the process is killed.
        text = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = open(0, closefd=False)
    faulthandler.enable(sys.stderr)
    if job.loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", job.loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", job.loopback)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _watch_parent(parent: int, directory: str) -> None:
    """If the launching process dies, whatever this rank has started must not outlive it."""
    while os.getppid() == parent:
        time.sleep(0.25)
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _run(job: Job, rank: int, recorder: Any) -> Report:
    from manyranks.runtime.errors import CollectiveMismatchError

    try:
        return _run_program(job, rank, recorder)
    except SystemExit as error:
        return Report(
            rank, time.perf_counter(), f"the program called sys.exit({error.code!r})", _traceback(error)
        )
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        return Report(
            rank,
            time.perf_counter(),
            text.split("\n", 1)[0][:2000],
            _traceback(error),
            follows=_lost_a_peer(error),
            mismatch=isinstance(error, CollectiveMismatchError),
        )


def _run_program(job: Job, rank: int, recorder: Any) -> Report:
    import torch
    import torch.distributed as dist

    from manyranks.runtime import carry
    from manyranks.runtime.backend import connect
    from manyranks.runtime.torch_comm import TorchComm

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    world = connect(rank, job.ranks, job.device, job.backend, job.gpus, job.timeout, recorder, job.record)
    program, shared = pickle.loads(job.program)
    shared = carry.to_torch(shared, world.device)
    arguments = () if job.inputs is None else (carry.to_torch(pickle.loads(job.inputs[rank]), world.device),)
    job.program, job.inputs = b"", None
    comm = TorchComm(world, tuple(range(job.ranks)), 0, world.main, 0)
    _start_together(world)
    recorder.leave()
    result = program(comm, *arguments, **shared)
    world.drain()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    end = world.clock()
    world.wire.flush()
    recorder.enter("finished", end, 3)
    blob = _dumps_result(carry.from_torch(result))
    unanswered = world.unanswered()
    report = Report(
        rank, end, result=blob, start=world.start, end=end, sent=world.sent, arrived=world.arrived, nominal=world.nominal,
        waits=world.waits, labels=world.labels, records=world.records, calls=world.calls, unanswered=unanswered,
    )  # fmt: skip
    if job.ranks > 1:
        dist.barrier()  # nobody leaves while another may still take what it has sent
    if not unanswered:
        dist.destroy_process_group()
    return report


def _dumps_result(result: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(result, protocol=5)
    except Exception as error:
        raise TypeError(
            f"the program returned a {type(result).__name__} that can't be sent back: it is, or holds, something that "
            f"can't be pickled ({type(error).__name__}: {error})"
        ) from error


def _start_together(world: Any) -> None:
    """One start for all: the clock that the run is timed with. Processes of one machine share `perf_counter`."""
    import torch
    import torch.distributed as dist

    at = torch.tensor([world.clock() + 0.004], dtype=torch.float64)
    if world.size > 1:
        dist.barrier()
        at[0] = world.clock() + 0.004
        dist.broadcast(at, 0)
    world.start = float(at[0])
    time.sleep(max(0.0, world.start - world.clock()))


def _lost_a_peer(error: BaseException) -> bool:
    """Whether the error only says that a connection to another rank broke."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return any(sign in text for sign in (*signs, "Connection was likely closed"))


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of this package that only lead to the program."""
    ours = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    kept = [f for f in frames if not f.filename.startswith(ours)] or list(frames)
    text = "Traceback (most recent call last):\n" + "".join(traceback.format_list(kept))
    return text + "".join(traceback.format_exception_only(type(error), error))


def start_spawned(directory: str) -> None:
    """The first thing a spawned rank does: read the job."""
    import linecache

    with open(Path(directory) / "job", "rb") as file:
        job: Job = pickle.load(file)
    linecache.cache.update(job.sources)
    rank = os.environ["RANK"]
    job.program = (Path(directory) / "program").read_bytes()
    if job.inputs is not None:
        job.inputs = [b""] * job.ranks
        job.inputs[int(rank)] = (Path(directory) / f"input-{rank}").read_bytes()
    main(job)
    os._exit(0)


if __name__ == "__main__":
    with open(Path(sys.argv[1]) / "path", "rb") as _file:
        sys.path[:] = pickle.load(_file)
    # By its name, so that reports can be unpickled in the launching process.
    from manyranks.runtime import rank_process

    rank_process.start_spawned(sys.argv[1])
