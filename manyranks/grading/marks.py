"""From results to marks: the late policy's share, and the table of all students in a stable order."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from manyranks.grading.batch import Result
from manyranks.grading.lab import Plan
from manyranks.grading.late import Dates, Policy

__all__ = ["Mark", "make_marks", "marks_csv"]

COLUMNS = (
    "student",
    "id",
    "status",
    "mark",
    "out_of",
    "points",
    "late_hours",
    "late_factor",
    "failed_tests",
    "notes",
)


@dataclass(frozen=True)
class Mark:
    """What stands in the gradebook for one student, and why."""

    result: Result
    out_of: float
    seconds_late: float
    factor: float

    @property
    def mark(self) -> float:
        return tidy(self.result.points * self.factor)

    @property
    def status(self) -> str:
        """graded, late, missing, empty, misnamed, unreadable, link, too-large, or grader (no mark: grade again)."""
        if self.result.kind != "ok":
            return self.result.kind
        return "late" if self.factor < 1 else "graded"


def tidy(value: float) -> float | int:
    """Two decimals at most, and none where there are none."""
    value = round(value + 0.0, 2)
    return int(value) if value == int(value) else value


def make_marks(results: Sequence[Result], plan: Plan, policy: Policy, dates: Dates) -> list[Mark]:
    """One mark a result. A file that Canvas flags as late, with no times to compute from, is only noted."""
    marks = []
    for result in results:
        late = dates.seconds_late(result.student, result.id, result.when) if result.kind == "ok" else 0.0
        if result.late_flag and late == 0 and result.kind == "ok":
            note = "Canvas flags this file as late; no times say by how much, so nothing was taken off."
            if note not in result.notes:
                result.notes.append(note)
        marks.append(Mark(result, tidy(plan.points), late, policy.factor(late)))
    return marks


def safe_cell(value: object) -> str:
    """Text that no spreadsheet takes for a formula."""
    text = str(value)
    text = "".join(c if c.isprintable() else " " for c in text)
    return "'" + text if text[:1] in ("=", "+", "-", "@") else text


def marks_csv(marks: Sequence[Mark]) -> str:
    """The table, sorted by student; the same marks give the same bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for m in sorted(marks, key=lambda m: (m.result.student.casefold(), m.result.student, m.result.id)):
        failed = [o.short for o in m.result.outcomes if not o.passed and m.result.kind == "ok"]
        writer.writerow(
            [
                safe_cell(m.result.student),
                safe_cell(m.result.id),
                m.status,
                m.mark if m.result.graded else "",
                m.out_of,
                tidy(m.result.points) if m.result.graded else "",
                tidy(m.seconds_late / 3600),
                m.factor,
                "; ".join(failed),
                safe_cell(" ".join(filter(None, [m.result.problem, *m.result.notes]))),
            ]
        )
    return out.getvalue()
