"""A run of real processes, seen from the process that launches it: start, watch, end, verdict."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from manyranks.runtime import gather
from manyranks.runtime.backend import Placement
from manyranks.runtime.errors import CollectiveMismatchError, LaunchTimeout, RankError
from manyranks.runtime.flight import FINISHED, IN_CALL, RUNNING, STARTING, FlightRecorder
from manyranks.runtime.hardware import machine
from manyranks.runtime.rank_process import Job, Report, main
from manyranks.runtime.run import Run

__all__ = ["NotStarted", "Supervisor"]

POLL = 0.05  # seconds between two looks at the ranks
STUCK = 0.5  # seconds in one call before its collectives are compared with the other ranks'
FORK_START = 15.0  # seconds, and one more for each rank, in which forked ranks have to come up


class NotStarted(Exception):
    """Forked ranks did not come up: a lock was held by another thread of this process when it was copied."""


class Supervisor:
    """One run, seen from the launching process."""

    def __init__(self, job: Job, method: str, place: Placement):
        self.job, self.method, self.place = job, method, place
        self.directory = Path(job.directory)
        self.recorders = [
            FlightRecorder(self.directory / f"flight-{r}", create=True) for r in range(job.ranks)
        ]
        self.output = gather.Output(self.directory, job.ranks)
        self.over = threading.Event()
        self.failures: dict[int, int] = {}  # rank -> exit code, as the agent found them
        self.agent_error: BaseException | None = None
        self.gone: dict[int, float] = {}
        self.others = set(multiprocessing.active_children())
        self.description = machine()  # now, since this thread has to be still while the agent's forks

    def run(self) -> Run:
        sys.stdout.flush()
        sys.stderr.flush()
        agent = threading.Thread(target=self._agent, name="torchrun agent", daemon=True)
        try:
            agent.start()
            verdict = self._watch()
        finally:
            self._end_all()
            self.output.show()
        if verdict is not None:
            raise verdict
        reports = self._reports()
        self._check(reports)
        on = {"backend": self.job.backend, "device": self.job.device, "start": self.method}
        return gather.run_of(
            [reports[r] for r in range(self.job.ranks)], self.place, {**self.description, **on}
        )

    # ------------------------------------------------------------------ the agent

    def _agent(self) -> None:
        """torchrun's elastic agent, on a thread of its own: so it leaves this process's signal handlers alone."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        try:
            stores = _serve()
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=self.job.ranks,
                run_id=uuid.uuid4().hex,
                rdzv_backend="static",
                rdzv_endpoint=f"127.0.0.1:{stores[0].port}",  # the port that the system gave; the agent shares the server
                rdzv_configs={"rank": 0, "timeout": 60},
                max_restarts=0,
                monitor_interval=0.02,
                start_method="fork" if self.method == "fork" else "spawn",
                logs_specs=DefaultLogsSpecs(log_dir=str(self.directory / "torchelastic")),
                local_addr="127.0.0.1",
            )
            if self.method == "fork":
                elastic_launch(config, main)(self.job)
            else:
                self._write_job()
                script = str(Path(__file__).with_name("rank_process.py"))
                elastic_launch(config, sys.executable)(script, str(self.directory))
        except ChildFailedError as error:
            self.failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except BaseException as error:
            self.agent_error = error
        finally:
            self.over.set()

    def _write_job(self) -> None:
        import linecache

        job = self.job
        (self.directory / "path").write_bytes(pickle.dumps(sys.path))
        (self.directory / "program").write_bytes(job.program)
        for rank, blob in enumerate(job.inputs or []):
            (self.directory / f"input-{rank}").write_bytes(blob)
        cells = {
            name: entry
            for name, entry in linecache.cache.items()
            if len(entry) == 4 and not os.path.exists(name)
        }
        light = Job(
            **{**vars(job), "program": b"", "inputs": None if job.inputs is None else [], "sources": cells}
        )
        (self.directory / "job").write_bytes(pickle.dumps(light))

    # ------------------------------------------------------------------ watching

    def _watch(self) -> Exception | None:
        """Wait for the end. Returns what went wrong, if this process was the one to see it."""
        began, started = time.monotonic(), None
        while not self.over.wait(POLL):
            now = time.monotonic()
            self.output.trim()
            status = [recorder.read() for recorder in self.recorders]
            if started is None and all(pid and state for pid, state, _, _ in status):
                started = now
            mismatch = self._mismatch(status)
            if mismatch is not None:
                return mismatch
            verdict = self._vanished(status, now)
            if verdict is not None:
                return verdict
            if self.method == "fork" and started is None and now - began > FORK_START + self.job.ranks:
                raise NotStarted
            # Starting up is not the program's time, but it has to end some time as well.
            if now - (started or began + max(30.0, 2.0 * self.job.ranks)) > self.job.timeout:
                return self._mismatch(status, at_once=True) or self._timed_out(status)
        return None

    def _mismatch(self, status: list[tuple], at_once: bool = False) -> CollectiveMismatchError | None:
        """Compare the ranks' last collectives if one of them has been in a call for long."""
        now = time.perf_counter()
        if not at_once and not any(state == IN_CALL and now - since > STUCK for _, state, since, _ in status):
            return None
        return gather.mismatch([recorder.collectives() for recorder in self.recorders])

    def _vanished(self, status: list[tuple], now: float) -> RankError | None:
        """A rank that is gone without a report and that the agent did not miss: it exited with code 0."""
        for rank, (pid, state, _, _) in enumerate(status):
            if (
                pid
                and state != FINISHED
                and not (self.directory / f"report-{rank}").exists()
                and not _alive(pid)
            ):
                if now - self.gone.setdefault(rank, now) > 1.0:
                    return RankError(
                        rank, "the process exited with code 0 before the program had ended (os._exit?)"
                    )
        return None

    def _timed_out(self, status: list[tuple]) -> LaunchTimeout:
        now = time.perf_counter()
        calls = {
            rank: _in_words(state, since, text, now) for rank, (_, state, since, text) in enumerate(status)
        }
        lines = [f"  rank {rank}: {words}" for rank, words in calls.items()]
        head = f"not done within timeout={self.job.timeout:g} s; all ranks were ended. Their last communication calls:"
        return LaunchTimeout("\n".join([head, *lines]), calls)

    def _end_all(self) -> None:
        """Leave no process behind, nor one that a rank has started."""
        began = time.monotonic()
        while True:
            ended = self.over.is_set()
            for recorder in self.recorders:
                pid = recorder.read()[0]
                if pid:
                    _kill_group(pid)
            waited = time.monotonic() - began
            if ended or waited > 30:
                return
            if waited > 1:  # ranks that never said who they are
                for process in set(multiprocessing.active_children()) - self.others:
                    process.kill()
            self.over.wait(POLL)

    # ------------------------------------------------------------------ the verdict

    def _reports(self) -> dict[int, Report]:
        reports = {}
        for rank in range(self.job.ranks):
            path = self.directory / f"report-{rank}"
            if path.exists():
                reports[rank] = pickle.loads(path.read_bytes())
        return reports

    def _check(self, reports: dict[int, Report]) -> None:
        """Raise what went wrong first."""
        failed = [r for r in reports.values() if r.error]
        if failed or self.failures or self.agent_error or len(reports) < self.job.ranks:
            mismatch = gather.mismatch([recorder.collectives() for recorder in self.recorders])
            if mismatch is not None:
                raise mismatch
        own = [r for r in failed if not r.follows]
        if own:
            first = min(own, key=lambda r: r.time)
            raise RankError(first.rank, first.error, first.traceback)
        for rank, code in sorted(self.failures.items()):
            if rank not in reports:
                raise RankError(rank, _exit_in_words(code))
        if failed:
            first = min(failed, key=lambda r: r.time)
            raise RankError(first.rank, first.error, first.traceback)
        missing = [rank for rank in range(self.job.ranks) if rank not in reports]
        if self.agent_error is not None:
            raise RuntimeError(f"torchrun's agent failed: {self.agent_error}") from self.agent_error
        if missing:
            raise RankError(missing[0], "the process ended without a report")


def _serve() -> list[Any]:
    """A store on a port that the system gives. The agent shares its server, so that nobody can take the port meanwhile.

    torch finds a server to be shared by its port, but forgets to note a new one's if this process had one on the same
    port before. So it is tried out, and another port is taken if need be. Keep what is returned.
    """
    from torch.distributed import TCPStore

    options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    for attempt in range(10):
        store = TCPStore("127.0.0.1", 0, **options)
        try:
            return [store, TCPStore("127.0.0.1", store.port, **options)]
        except RuntimeError:
            if attempt == 9:
                raise
    raise AssertionError


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _exit_in_words(code: int) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the process was killed by {name}"
    return f"the process exited with code {code} before the program had ended"


def _in_words(state: int, since: float, text: str, now: float) -> str:
    call, _, where = text.partition("\t")
    at = f", at {where}" if where else ""
    if state == STARTING:
        return "still starting"
    if state == FINISHED:
        return "finished"
    if state == RUNNING:
        return f"none under way; the last was {call}{at}" if call else "none yet"
    return f"{call}, for {now - since:.1f} s{at}"
