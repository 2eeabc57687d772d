"""After `launch`: the ranks' reports put together into one `Run`, and what they printed."""

from __future__ import annotations

import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

from manyranks.runtime.errors import CollectiveMismatchError, RankError, UnreceivedMessageError
from manyranks.runtime.flight import first_difference
from manyranks.runtime.run import Interval, Message, Record, Run, Timeline, Traffic

__all__ = ["Output", "mismatch", "run_of"]

SHOWN = 1_000_000  # bytes of each stream of a rank that are shown
KEPT = 8 * SHOWN  # bytes of it that may stand on disk while it runs
# gloo ends the process when sizes differ; the error that `launch` raises says so better
_ABORT = "terminate called after throwing an instance of 'gloo::"
# torch's own lines in C++: "[W118 10:02:41.0 TCPStore.cpp:106] ..." and the frames that follow
_NOISE = re.compile(r"^\[(?:rank\d+\]:)?\[?[WEI]\d{3,4} [\d:.]+ .*|^frame #\d+: .*|^Exception raised from .*")


class Output:
    """What the ranks print: kept in files while they run, shown in rank order afterwards."""

    def __init__(self, directory: Path, ranks: int):
        self.files = [directory / f"{name}-{rank}" for rank in range(ranks) for name in ("stdout", "stderr")]
        self.cut: set[Path] = set()

    def trim(self) -> None:
        """Cut what would only fill the disk. The ranks append, so they go on at the new end."""
        for path in self.files:
            try:
                if path.stat().st_size > KEPT:
                    os.truncate(path, SHOWN)
                    self.cut.add(path)
            except OSError:
                pass

    def show(self) -> None:
        """Print it in one piece, standard output and standard error each to its own."""
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            text = "".join(self._text(path) for path in self.files if path.name.startswith(name))
            if text:
                stream.write(text)
                stream.flush()

    def _text(self, path: Path) -> str:
        try:
            with open(path, "rb") as file:
                data = file.read(SHOWN)
                more = path in self.cut or file.read(1)
        except OSError:
            return ""
        text = data.decode("utf-8", "replace")
        name, _, rank = path.name.partition("-")
        if name == "stderr":
            text = text.partition(_ABORT)[0]
            text = "".join(line for line in text.splitlines(keepends=True) if not _NOISE.match(line))
        if more:
            text += f"\n... rank {rank} wrote more than {SHOWN / 1e6:g} MB to {name}; the rest is not shown\n"
        return text


def mismatch(seen: list[dict[tuple[int, int], str]]) -> CollectiveMismatchError | None:
    """The first collective call in which two ranks differ, from what each rank's flight recorder kept."""
    found: dict[tuple[int, int], tuple[int, str]] = {}
    first: tuple[int, CollectiveMismatchError] | None = None
    for rank, calls in enumerate(seen):
        for key, text in calls.items():
            other, theirs = found.setdefault(key, (rank, text))
            if theirs != text and (first is None or key[1] < first[0]):
                first = key[1], _differ(other, theirs, rank, text)
    return first[1] if first else None


def _differ(a: int, call_a: str, b: int, call_b: str) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"the ranks of a group must make the same collective call: rank {a} called {call_a}, rank {b} called {call_b}"
    )


def run_of(reports: list[Any], place: Any, description: dict) -> Run:
    """The `Run` of reports that all ended well. Raises what only all of them together show."""
    groups: dict[Any, dict[int, Any]] = {}
    for report in reports:
        for key, log in report.calls.items():
            groups.setdefault(key, {})[report.rank] = log
    for logs in groups.values():
        difference = first_difference(logs)
        if difference is not None:
            raise _differ(*difference)
    start = min(report.start for report in reports)
    traffic = Traffic(_messages(reports, start), len(reports))
    results = []
    for report in reports:
        try:
            results.append(pickle.loads(report.result))
        except Exception as error:
            text = f"its result can't be unpickled here ({type(error).__name__}: {error})"
            raise RankError(report.rank, text) from error
    return Run(
        results=results,
        seconds=max(report.end for report in reports) - start,
        traffic=traffic,
        timeline=Timeline([interval for report in reports for interval in _intervals(report, start)]),
        cluster=description,
        world=place.world,
        ends=[report.end - start for report in reports],
        records=sorted(
            (Record(*r) for report in reports for r in report.records), key=lambda r: (r.time, r.rank)
        ),
        nominal=any(report.nominal for report in reports),
        notes=_notes(reports, place),
    )


def _notes(reports: list[Any], place: Any) -> list[str]:
    notes = [place.note]
    if any(report.nominal for report in reports):
        notes.append(
            "bytes of the backend's own collectives are nominal (a ring's): what it really sends can't be seen from outside"
        )
    return notes


def _messages(reports: list[Any], start: float) -> list[tuple]:
    ends = {(src, number): end for report in reports for src, number, end in report.arrived}
    out = []
    for report in reports:
        for number, dst, nbytes, began, round_, call, tier in report.sent:
            end = ends.get((report.rank, number))
            if end is None:
                raise UnreceivedMessageError(
                    f"rank {report.rank} sent a message to rank {dst} that nobody received ({nbytes} bytes)"
                )
            out.append(Message(report.rank, dst, nbytes, began - start, end - start, round_, call, tier))
        if report.unanswered:
            src = report.unanswered[0]
            raise UnreceivedMessageError(
                f"rank {report.rank} posted a receive from rank {src} that nothing answered"
            )
        for row in report.nominal:
            message = Message(*row)
            out.append(message._replace(start=message.start - start, end=message.end - start))
    return out


def _intervals(report: Any, start: float) -> list[Interval]:
    """What was noted as waiting, and between it, on the program's own lane, computing."""
    rank, out = report.rank, []
    for lane, label, began, ended in report.waits:
        out.append(Interval(rank, lane, "comm" if lane else "wait", label, began - start, ended - start))
    at, labels = 0.0, iter([*((time - start, label) for time, label in report.labels), (float("inf"), "")])
    mark = next(labels)
    gaps = []
    own = sorted((i for i in out if i.lane == 0), key=lambda i: i.start)
    for began, ended in [*((i.start, i.end) for i in own), (report.end - start, report.end - start)]:
        label = "compute"
        while mark[0] <= began:
            label = mark[1] if mark[0] >= at else label
            mark = next(labels)
        if began - at > 1e-6:
            gaps.append(Interval(rank, 0, "compute", label, at, began))
        at = max(at, ended)
    return sorted(out + gaps, key=lambda i: (i.lane, i.start))
