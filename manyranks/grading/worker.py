"""One submission: the lab's tests, run by pytest in this trusted process, with the submission behind its wall.

``python -m manyranks.grading.worker ORDER`` reads a JSON file (lab, staged folder, limits, where to write) and writes one
line of JSON for each test as it ends, so that what was earned is kept even if this process has to be ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

try:
    import pytest
except ModuleNotFoundError:
    raise SystemExit('The grader runs a lab\'s tests with pytest: pip install "pytest>=8"') from None

from manyranks.grading import kernel
from manyranks.grading.proxy import LabModule, Session
from manyranks.grading.sandbox import Fault, Limits, Sandbox, SandboxUnavailable

__all__ = ["main"]


class OutOfTime(BaseException):
    """A test's time is over. No `except Exception` of a test stops it."""


class Recorder:
    """The pytest plugin: fresh children for each test, and what became of it."""

    def __init__(self, session: Session, limits: Limits, write: Any):
        self.session, self.limits, self.write = session, limits, write

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            fault = self.session.fault
            message = str(fault) if fault else _last_line(report.longrepr)
            self.write(
                event="uncollected",
                file=Path(str(report.fspath)).name,
                message=message,
                fault=fault.kind if fault else "",
            )

    def pytest_collection_modifyitems(self, items: list) -> None:
        for item in items:
            marker = item.get_closest_marker("points")
            points = marker.args[0] if marker and marker.args else 0
            self.write(event="found", test=_name(item), case=item.nodeid, points=points, doc=_doc(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
        self.session.begin_test()
        self.began = time.monotonic()
        try:
            return (yield)
        finally:
            self.session.end_test()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        def ring(*_: Any) -> None:
            message = f"the test took longer than {self.limits.test_seconds:g} s and was ended"
            self.session.fault = self.session.fault or Fault("time", message)
            raise OutOfTime(message)

        before = signal.signal(signal.SIGALRM, ring)
        # again every second: whatever swallows it once
        signal.setitimer(signal.ITIMER_REAL, self.limits.test_seconds, 1.0)
        try:
            return (yield)
        except OutOfTime as error:
            raise AssertionError(str(error)) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if call.when == "call" or (report.outcome != "passed"):
            self.session.end_test()  # what its children printed is known now
            fault = self.session.fault
            outcome = "failed" if fault else report.outcome
            message = ""
            if outcome != "passed":
                message = str(fault) if fault else _message(call.excinfo)
            self.write(
                event="ended",
                test=_name(item),
                case=item.nodeid,
                outcome=outcome,
                message=message[:4000],
                where=_where(call.excinfo) if outcome != "passed" else "",
                fault=fault.kind if fault else "",
                output="".join(self.session.output)[: 2 * self.limits.kept_output],
                seconds=round(time.monotonic() - self.began, 3),
            )
            if self.session.broken:
                pytest.exit("the sandbox failed", returncode=9)
        return report


def _name(item: Any) -> str:
    return f"{Path(str(item.fspath)).name}::{item.originalname or item.name}"


def _doc(item: Any) -> str:
    text = (item.function.__doc__ or "").strip() if hasattr(item, "function") else ""
    return " ".join(text.split("\n\n")[0].split())


def _message(excinfo: Any) -> str:
    if excinfo is None:
        return "the test was skipped"
    error = excinfo.value
    text = str(error)
    name = type(error).__name__
    if isinstance(error, AssertionError) and not name.startswith("_"):
        lines = [line for line in text.splitlines() if "Use -v to get more diff" not in line]
        return "\n".join(lines).strip() or "an assertion failed"
    if isinstance(error, pytest.fail.Exception) or isinstance(error, pytest.skip.Exception):
        return text
    if name == "_SubmissionAssertion":
        return f"an assert of yours failed: {text}" if text else "an assert of yours failed"
    cause = error.__cause__
    if name == "RankError" and cause is not None:
        return f"rank {getattr(error, 'rank', '?')}: {type(cause).__name__}: {cause}"
    return f"{name}: {text}" if text else name


def _where(excinfo: Any) -> str:
    """Where in the submission's own files the exception was raised that ended the test, if it was one of theirs."""
    error = excinfo.value if excinfo else None
    while error is not None:
        if hasattr(error, "__manyranks_where__"):
            return error.__manyranks_where__
        error = error.__cause__
    return ""


def _last_line(longrepr: Any) -> str:
    lines = [line for line in str(longrepr).splitlines() if line.startswith("E ")]
    return (lines[-1][1:].strip() if lines else str(longrepr).strip().splitlines()[-1])[:2000]


def main(order_file: str) -> int:
    kernel.die_with_parent()  # and the sandbox with us
    order = json.loads(Path(order_file).read_text())
    limits = Limits(**order["limits"])
    lab = Path(order["lab"])
    with open(order["events"], "w", encoding="utf-8") as events:

        def write(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            sandbox = Sandbox(order["staged"], limits, tuple(order["preload"]), order["mode"])
        except (SandboxUnavailable, OSError) as error:
            write(event="broken", message=str(error))
            return 9
        with sandbox:
            session = Session(sandbox)
            name = "lab"
            sys.modules[name] = LabModule(name, session)
            os.environ["LAB_MODULE"] = name
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            os.environ.pop("PYTEST_ADDOPTS", None)
            os.chdir(lab)
            files = [f for f in ("test_lab.py", "test_grading.py") if (lab / f).is_file()]
            args = [
                *files,
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:doctest",
                "--continue-on-collection-errors",
                "--rootdir",
                str(lab),
                "--noconftest",
            ]
            args += ["-c", "pytest.ini"] if (lab / "pytest.ini").is_file() else ["-c", os.devnull]
            code = pytest.main(args, plugins=[Recorder(session, limits, write)])
            if session.broken:
                write(event="broken", message=session.broken)
            write(event="finished", code=int(code), peak=_peak())
    return 0


def _peak() -> int:
    import resource

    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(usage) * 1024


def order(lab: Path, staged: Path, limits: Limits, preload: list[str], mode: str, events: Path) -> str:
    """The text of an order."""
    return json.dumps(
        {
            "lab": str(lab),
            "staged": str(staged),
            "limits": dataclasses.asdict(limits),
            "preload": preload,
            "mode": mode,
            "events": str(events),
        }
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
