"""Many submissions at once, each in a worker process with a sandbox of its own; interrupted, it goes on where it was.

The folder `out/state` keeps a file for each student: the result, and a key made of the submission's bytes and the
lab's. Whoever hands in another file is graded again, and so is everybody when a test changes. Marks, late penalties,
pages and exports are computed from these results every time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from manyranks.grading import worker
from manyranks.grading.collect import Submission
from manyranks.grading.lab import Lab, LabError, Plan, Test
from manyranks.grading.sandbox import find_mode

__all__ = ["Batch", "Outcome", "Result"]


@dataclass
class Outcome:
    """What one test function said of one submission."""

    name: str
    points: float
    passed: bool
    message: str = ""
    where: str = ""
    output: str = ""
    fault: str = ""
    seconds: float = 0.0

    @property
    def short(self) -> str:
        return self.name.partition("::")[2]


@dataclass
class Result:
    """One student's result, before any late penalty."""

    student: str
    id: str = ""
    kind: str = "ok"
    problem: str = ""
    notes: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0  # bytes, the larger of worker and sandbox
    when: float | None = None
    late_flag: bool = False
    file: str = ""  # sha256 of what was graded
    reused: bool = False

    @property
    def points(self) -> float:
        return sum(o.points for o in self.outcomes if o.passed)

    @property
    def graded(self) -> bool:
        """False if the grader itself failed: then there is no mark, not a mark of zero."""
        return self.kind != "grader"


def stage(files: dict[str, bytes], folder: Path) -> Path:
    """Write a submission's files where the sandbox may read them."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o444)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        path.chmod(0o755)
    return folder


class Batch:
    """Grades submissions of one lab."""

    def __init__(self, lab: Lab, out: Path, jobs: int | None = None, mode: str | None = None):
        self.lab, self.out = lab, Path(out)
        self.jobs = jobs or os.cpu_count() or 1
        self.mode = mode or find_mode()
        self.state = self.out / "state"
        self.state.mkdir(parents=True, exist_ok=True)
        self.lab_digest = lab.digest()
        self.live: set[subprocess.Popen] = set()
        self.lock = threading.Lock()
        self.stopped = False
        self.plan = self._plan()

    # ------------------------------------------------------------------ the lab's own solution first

    def _plan(self) -> Plan:
        """The tests and their points, from a run of the lab's solution in the sandbox: which must pass them all."""
        path = self.state / "plan.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["key"] == self.lab_digest:
                return Plan([Test(**t) for t in kept["tests"]])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        files = {"lab.py": (self.lab.folder / "solution.py").read_bytes()}
        if self.lab.allow_helpers:
            for helper in self.lab.folder.glob("*.py"):
                if helper.name not in ("lab.py", "solution.py") and not helper.name.startswith("test_"):
                    files[helper.name] = helper.read_bytes()
        events, _ = self._run(files)
        tests: dict[str, Test] = {}
        for event in events:
            if event["event"] == "found":
                test = tests.setdefault(event["test"], Test(event["test"], event["points"], event["doc"]))
                test.cases.append(event["case"])
            elif event["event"] == "broken":
                raise LabError(f"the sandbox failed: {event['message']}")
            elif event["event"] == "uncollected":
                raise LabError(f"{event['file']} can't be read by pytest: {event['message']}")
        plan = Plan(list(tests.values()))
        outcomes = self._outcomes(plan, events, "")
        failed = [f"{o.short}: {o.message}" for o in outcomes if not o.passed]
        if failed:
            raise LabError(
                f"the lab's own solution fails {len(failed)} of {len(outcomes)} tests in the sandbox, so nobody is "
                "graded by them:\n  " + "\n  ".join(failed)
            )
        if not plan.tests or plan.points <= 0:
            raise LabError("the lab's tests carry no points: mark them with @pytest.mark.points(n)")
        _write(path, json.dumps({"key": self.lab_digest, "tests": [asdict(t) for t in plan.tests]}, indent=1))
        return plan

    # ------------------------------------------------------------------ one submission

    def _run(self, files: dict[str, bytes]) -> tuple[list[dict], str]:
        """(events, how it ended: "", "time" or "crash") of one run of the tests."""
        with tempfile.TemporaryDirectory(prefix="manyranks-") as folder:
            base = Path(folder)
            if self.mode == "uid":
                base.chmod(0o711)
            staged = stage(files, base / "submission")
            events = base / "events"
            order = base / "order.json"
            limits = self.lab.limits
            order.write_text(
                worker.order(self.lab.folder, staged, limits, self.lab.preload, self.mode, events)
            )
            for private in (order,):
                private.chmod(0o600)
            with self.lock:
                if self.stopped:
                    raise KeyboardInterrupt
                process = subprocess.Popen(
                    [sys.executable, "-m", "manyranks.grading.worker", str(order)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": _package_path()},
                    start_new_session=True,
                )
                self.live.add(process)
            ended = ""
            try:
                process.wait(limits.submission_seconds)
                ended = "" if process.returncode in (0, 9) else "crash"
            except subprocess.TimeoutExpired:
                ended = "time"
            finally:
                self._kill(process)
                with self.lock:
                    self.live.discard(process)
            lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
            found = []
            for line in lines:
                try:
                    found.append(json.loads(line))
                except ValueError:  # cut off
                    break
        return found, ended

    @staticmethod
    def _kill(process: subprocess.Popen) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        process.wait()

    def _outcomes(self, plan: Plan, events: list[dict], ended: str) -> list[Outcome]:
        """A test passes if every case of the plan ran and passed. What didn't run failed."""
        cases = {e["case"]: [] for e in events if e["event"] == "ended"}
        for event in events:
            if event["event"] == "ended":
                cases[event["case"]].append(event)
        uncollected = {e["file"]: e for e in events if e["event"] == "uncollected"}
        why = {
            "time": f"all tests together may take {self.lab.limits.submission_seconds:g} s; this one was not reached in time",
            "crash": "the run ended before this test",
        }
        outcomes = []
        for test in plan.tests:
            outcome = Outcome(test.name, test.points, True)
            for case in test.cases:
                ran = cases.get(case, [])
                bad = next((e for e in ran if e["outcome"] != "passed"), None)
                outcome.seconds = round(outcome.seconds + max((e["seconds"] for e in ran), default=0), 3)
                outcome.output = outcome.output or "".join(e["output"] for e in ran)
                if ran and bad is None:
                    continue
                if outcome.passed:
                    outcome.passed = False
                    label = case.partition("[")[2].rstrip("]")
                    prefix = f"case {label}: " if label and len(test.cases) > 1 else ""
                    if bad is not None:
                        outcome.message, outcome.where = prefix + bad["message"], bad["where"]
                        outcome.fault = bad["fault"]
                    else:
                        stopped = uncollected.get(test.name.partition("::")[0], {})
                        outcome.message = prefix + (
                            stopped.get("message") or why.get(ended) or "this test did not run"
                        )
                        outcome.fault = stopped.get("fault") or ended
            outcomes.append(outcome)
        return outcomes

    def grade(self, submission: Submission) -> Result:
        """The result of one submission. Never raises for anything that is in it."""
        began = time.monotonic()
        result = Result(
            submission.student,
            submission.id,
            submission.kind,
            submission.problem,
            list(submission.notes),
            when=submission.when,
            late_flag=submission.late_flag,
            file=hashlib.sha256(submission.files["lab.py"]).hexdigest()
            if "lab.py" in submission.files
            else "",
        )
        if submission.problem:
            result.outcomes = [
                Outcome(t.name, t.points, False, submission.problem, fault=submission.kind)
                for t in self.plan.tests
            ]
            return result
        events, ended = [], ""
        for pause in (0, 5):  # a failure of ours gets a second try
            time.sleep(pause)
            events, ended = self._run(submission.files)
            broken = next((e for e in events if e["event"] == "broken"), None)
            if broken is None and ended != "crash":
                break
        if broken is not None:
            result.kind = "grader"
            result.problem = (
                f"The grader's sandbox failed twice, so there is no mark yet: {broken['message']}"
            )
        elif ended == "crash":
            result.notes.append("The run ended early twice; tests that had not run by then count as failed.")
        elif ended == "time":
            result.notes.append(
                f"The tests took longer than {self.lab.limits.submission_seconds:g} s together."
            )
        result.outcomes = self._outcomes(self.plan, events, ended)
        said = {o.message for o in result.outcomes}
        if len(result.outcomes) > 1 and len(said) == 1 and not any(o.passed for o in result.outcomes) and not ended:
            first = said.pop().splitlines()[0][:200]
            result.notes.append(f"All tests failed, with one message: {first}")
        result.peak = max((e["peak"] for e in events if e["event"] == "finished"), default=0)
        result.seconds = round(time.monotonic() - began, 2)
        return result

    # ------------------------------------------------------------------ all of them

    def _place(self, submission: Submission) -> Path:
        name = f"{submission.student}\0{submission.id}"
        slug = re.sub(r"[^A-Za-z0-9-]+", "-", submission.student)[:40].strip("-")
        return (
            self.state
            / f"{slug}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}.json"
        )

    def kept(self, submission: Submission, key: str | None = None) -> Result | None:
        """The result that an earlier run left, if it was made under `key` (None: under any)."""
        try:
            kept = json.loads(self._place(submission).read_text(encoding="utf-8"))
            if key is not None and kept["key"] != key:
                return None
            outcomes = [Outcome(**o) for o in kept["result"].pop("outcomes")]
            result = Result(**kept["result"], outcomes=outcomes)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        result.reused = True
        # what isn't in the key is taken from the submission as it is now
        result.when, result.late_flag, result.notes = (
            submission.when,
            submission.late_flag,
            list(submission.notes),
        )
        return result

    def run(
        self,
        submissions: Iterable[Submission],
        again: Callable[[Submission], bool] = lambda s: False,
        tell: Callable[[Result], None] = lambda r: None,
    ) -> list[Result]:
        """Grade all, in the order given; `tell` hears of each as it is done. `again`: don't reuse this one's result.

        Raises: KeyboardInterrupt, after everything that runs has been ended. What was done is kept.
        """
        submissions = list(submissions)
        results: dict[int, Result] = {}

        def one(number: int) -> Result:
            submission = submissions[number]
            key = f"{self.lab_digest}:{submission.digest()}"
            kept = None if again(submission) else self.kept(submission, key)
            if kept is not None:
                return kept
            result = self.grade(submission)
            if result.graded:
                _write(self._place(submission), json.dumps({"key": key, "result": _plain(result)}, indent=1))
            return result

        pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="grade")
        try:
            waiting = {pool.submit(one, n): n for n in range(len(submissions))}
            for done in as_completed(waiting):
                result = results[waiting[done]] = self._finish(done, submissions[waiting[done]])
                tell(result)
        except BaseException:
            with self.lock:
                self.stopped = True
                live = list(self.live)
            pool.shutdown(wait=False, cancel_futures=True)
            for process in live:
                self._kill(process)
            pool.shutdown(wait=True)
            raise
        pool.shutdown()
        return [results[n] for n in range(len(submissions))]

    def _finish(self, done: object, submission: Submission) -> Result:
        try:
            return done.result()
        except Exception as error:  # a bug of ours, or a full disk: this one has no mark, the others go on
            result = Result(
                submission.student,
                submission.id,
                "grader",
                f"The grader failed: {type(error).__name__}: {error}",
            )
            result.outcomes = [
                Outcome(t.name, t.points, False, result.problem, fault="grader") for t in self.plan.tests
            ]
            return result


def _plain(result: Result) -> dict:
    plain = asdict(result)
    plain.pop("reused")
    return plain


def _package_path() -> str:
    import manyranks

    return os.path.dirname(os.path.abspath(next(iter(manyranks.__path__))))


def _write(path: Path, text: str) -> None:
    """All of it or nothing: an interruption leaves the old file."""
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)
