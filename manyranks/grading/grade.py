"""`python -m manyranks grade`: a folder of submissions in, marks, pages and exports out."""

from __future__ import annotations

import argparse
import csv
import signal
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

from manyranks.grading import canvas
from manyranks.grading.batch import Batch, Result
from manyranks.grading.collect import Submission, collect
from manyranks.grading.feedback import feedback_name, feedback_page
from manyranks.grading.lab import Lab, LabError
from manyranks.grading.late import Dates, LateError, Policy
from manyranks.grading.marks import make_marks, marks_csv, tidy
from manyranks.grading.report import class_report
from manyranks.grading.sandbox import SandboxUnavailable

__all__ = ["main"]


def parse(argv: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m manyranks grade",
        description="Grade a folder of submissions. Interrupted, the same command goes on where it was.",
        epilog="Submissions run in a sandbox of bubblewrap. There is no switch to run them without one.",
    )
    parser.add_argument("lab", type=Path, help="the lab's folder, for example labs/lab-01-parallelism-engine")
    parser.add_argument(
        "submissions", type=Path, help="a folder of folders, or an unpacked download of Canvas or Moodle"
    )
    parser.add_argument("--out", type=Path, help="where results go (default: grading-<lab> in this folder)")
    parser.add_argument("--jobs", type=int, help="submissions at once (default: one for each core)")
    parser.add_argument(
        "--student", action="append", default=[], metavar="NAME", help="grade only this one, again"
    )
    parser.add_argument(
        "--roster",
        type=Path,
        help="CSV or text file with a name or LMS number first in each line: who is missing",
    )
    parser.add_argument(
        "--late-policy", default="none", metavar="POLICY", help='for example "10%%/day,max 50%%,grace 15min"'
    )
    parser.add_argument("--due", metavar="TIME", help="when it was due, for example 2026-10-31T23:59+02:00")
    parser.add_argument(
        "--times",
        type=Path,
        metavar="CSV",
        help="columns student, submitted and due; else the files' times count",
    )
    parser.add_argument(
        "--canvas", type=Path, metavar="CSV", help="your gradebook as exported from Canvas, to fill in"
    )
    parser.add_argument(
        "--assignment",
        metavar="NAME",
        help="the column of --canvas: name or number (default: the lab's title)",
    )
    return parser, parser.parse_args(argv)


def read_roster(path: Path) -> list[str]:
    """The first column, without a heading "student"."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        names = [row[0].strip() for row in csv.reader(file) if row and row[0].strip()]
    return names[1:] if names and names[0].casefold() in ("student", "name", "id") else names


def line(result: Result, points: float) -> str:
    """What is said of one student as the batch goes; no name steers the terminal."""
    return "".join(c if c.isprintable() else "?" for c in _line(result, points))


def _line(result: Result, points: float) -> str:
    name = result.student
    if result.problem:
        return f"{name:<28} {'-' if not result.graded else 0:>5} of {tidy(points)}  {result.kind}: {result.problem}"
    failed = [o.short for o in result.outcomes if not o.passed]
    said = "all tests passed" if not failed else f"{len(failed)} failed: {', '.join(failed[:3])}"
    said += ", …" if len(failed) > 3 else ""
    kept = "  (kept)" if result.reused else f"  {result.seconds:.1f} s"
    return f"{name:<28} {tidy(result.points):>5} of {tidy(points)}  {said}{kept}"


def main(argv: list[str]) -> int:
    parser, options = parse(argv)

    def stop(message: object) -> int:
        print(f"{parser.prog}: {message}", file=sys.stderr)
        return 2

    try:
        if options.jobs is not None and options.jobs < 1:
            return stop(f"--jobs must be at least 1, got {options.jobs}")
        lab = Lab(options.lab)
        policy = Policy.parse(options.late_policy)
        dates = Dates(options.due, options.times)
        if policy.share and not options.due and not options.times:
            return stop("--late-policy needs --due or --times to know when the lab was due")
        export = options.canvas.read_bytes().decode("utf-8") if options.canvas else None
        out = options.out or Path(f"grading-{lab.name}")
        if options.submissions.resolve() in [out.resolve(), *out.resolve().parents]:
            return stop(f"--out {out} lies in the submissions' folder, and would be taken for one")
        roster = read_roster(options.roster) if options.roster else None
        submissions = collect(options.submissions, lab.allow_helpers, roster)
        if not submissions:
            return stop(f"there are no submissions in {options.submissions}")
        chosen = _chosen(submissions, options.student)
        print(f"{lab.title}: {len(submissions)} students. First the lab's own solution.", flush=True)
        batch = Batch(lab, out, options.jobs)
    except (LabError, LateError, SandboxUnavailable, OSError, UnicodeDecodeError, LookupError) as error:
        return stop(error)
    points = batch.plan.points
    if export is not None:  # a wrong column is told before an hour of work, not after
        try:
            canvas.fill(export, [], options.assignment or lab.title, points)
        except canvas.CanvasError as error:
            return stop(error)
    print(f"It passes all {len(batch.plan.tests)} tests: {tidy(points)} points.", flush=True)

    began = time.monotonic()
    results: list[Result] = []
    before = _like_an_interrupt(signal.SIGTERM)
    try:
        if options.student:  # the others stay as they are
            results = [r for r in map(batch.kept, submissions) if r is not None]
            results = [r for r in results if (r.student, r.id) not in {(s.student, s.id) for s in chosen}]
        with tqdm(total=len(chosen), unit="student", file=sys.stderr, dynamic_ncols=True) as bar:

            def tell(result: Result) -> None:
                bar.write(line(result, points), file=sys.stdout)
                bar.update()

            results += batch.run(chosen, (lambda s: True) if options.student else (lambda s: False), tell)
    except KeyboardInterrupt:
        print("\nInterrupted. What is done is kept; the same command goes on from here.", file=sys.stderr)
        return 130
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)

    marks = make_marks(results, batch.plan, policy, dates)
    marks.sort(key=lambda m: (m.result.student.casefold(), m.result.student, m.result.id))
    _put(out / "marks.csv", marks_csv(marks))
    pages = out / "feedback"
    pages.mkdir(exist_ok=True)
    names = {feedback_name(m): m for m in marks}
    for old in pages.glob("*.html"):
        if old.name not in names:
            old.unlink()
    for name, mark in names.items():
        _put(pages / name, feedback_page(mark, batch.plan, lab.title))
    _put(out / "report.html", class_report(marks, batch.plan, lab.title))
    written = ["marks.csv", "report.html", "feedback/"]
    said = []
    if export is not None:
        filled = canvas.fill(export, marks, options.assignment or lab.title, points)
        _put(out / "canvas.csv", filled.text)
        written.append("canvas.csv")
        said = [f"Canvas: {text}" for text in filled.report()]
    print(
        f"{len(results)} students in {time.monotonic() - began:.0f} s. Written to {out}/: {', '.join(written)}"
    )
    for text in said:
        print(text)
    left = len(submissions) - len(results)
    if left:
        print(f"{left} students have not been graded yet: run without --student.")
    broken = [m.result.student for m in marks if not m.result.graded]
    if broken:
        print(
            f"NOT GRADED, the grader itself failed: {', '.join(broken)}. Run the same command again.",
            file=sys.stderr,
        )
        return 3
    return 0


def _like_an_interrupt(number: int) -> object:
    """Let a signal end the batch as Ctrl-C does. Returns what was there before; None where that can't be set."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    return signal.signal(number, stop) if threading.current_thread() is threading.main_thread() else None


def _chosen(submissions: list[Submission], names: list[str]) -> list[Submission]:
    if not names:
        return submissions
    chosen = [s for s in submissions if s.student in names or (s.id and s.id in names)]
    for name in names:
        if not any(name in (s.student, s.id) for s in submissions):
            raise LookupError(
                f"no submission of {name!r}; there are {', '.join(s.student for s in submissions[:20])}"
            )
    return chosen


def _put(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.write(text)
