"""Marks for Canvas, put into the gradebook file that the instructor exported from it.

Canvas finds students by the ID columns of its own export, so those stay as they are, as does everything else but the one
assignment's column.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from manyranks.grading.collect import letters, spellings
from manyranks.grading.marks import Mark, tidy

__all__ = ["CanvasError", "Filled", "fill"]

NOT_ASSIGNMENTS = {
    "student",
    "id",
    "sis user id",
    "sis login id",
    "integration id",
    "root account",
    "section",
}


class CanvasError(ValueError):
    """The export or the assignment's name doesn't fit."""


@dataclass
class Filled:
    """The filled gradebook, and what to look at before importing it."""

    text: str
    column: str
    filled: int = 0
    scale: float = 1.0
    unmatched_submissions: list[str] = field(default_factory=list)
    students_without: list[str] = field(default_factory=list)
    not_graded: list[str] = field(default_factory=list)

    def report(self) -> list[str]:
        lines = [f"{self.filled} marks written into the column {self.column!r}."]
        if self.scale != 1:
            lines.append(
                f"Canvas's points possible differ from the lab's: marks were multiplied by {self.scale:g}."
            )
        for what, names in (
            ("Submissions of nobody in the export, not written", self.unmatched_submissions),
            ("Not graded, left as they were", self.not_graded),
            ("Students in the export without a submission, left as they were", self.students_without),
        ):
            if names:
                lines.append(f"{what} ({len(names)}): {', '.join(names)}")
        return lines


def fill(export: str, marks: Sequence[Mark], assignment: str, points: float) -> Filled:
    """`export`, the text of a gradebook exported from Canvas, with the marks in the column of `assignment`.

    A student is found by the Canvas ID in the download's file name; else by SIS user ID, login ID or name, if only one
    student has it.

    Raises: CanvasError if the text is no gradebook, or the assignment's column isn't there or not the only one.
    """
    bom = "\ufeff" if export.startswith("\ufeff") else ""
    rows = list(csv.reader(io.StringIO(export.removeprefix("\ufeff"))))
    if not rows or "Student" not in rows[0] or "ID" not in rows[0]:
        raise CanvasError("this is no gradebook of Canvas: its first line has no columns Student and ID")
    head = rows[0]
    column = _column(head, assignment)
    student, number = head.index("Student"), head.index("ID")
    keys: list[tuple[str, dict[str, list[int]]]] = [(n, {}) for n in ("id", "sis", "login", "name")]
    by = dict(keys)
    possible: float | None = None
    people: list[int] = []
    for i, row in enumerate(rows[1:], 1):
        row += [""] * (len(head) - len(row))
        if row[student].strip() == "Points Possible":
            text = row[column].strip()
            try:
                possible = float(text)
            except ValueError:
                if text:
                    raise CanvasError(f"points possible of {head[column]!r} is {text!r}, no number") from None
                row[column] = str(tidy(points))
                possible = points
            continue
        if not row[number].strip():
            continue  # "Manual Posting" and the like
        people.append(i)
        by["id"].setdefault(row[number].strip(), []).append(i)
        for key, title in (("sis", "SIS User ID"), ("login", "SIS Login ID")):
            if title in head and row[head.index(title)].strip():
                by[key].setdefault(row[head.index(title)].strip().casefold(), []).append(i)
        for name in spellings(row[student]):
            by["name"].setdefault(name, []).append(i)
    if possible is None:
        possible = points
    filled = Filled("", head[column], scale=possible / points if points else 1.0)
    taken: dict[int, str] = {}
    # Who is missing comes last: a roster may call somebody otherwise than the download, and a zero must not win.
    for mark in sorted(marks, key=lambda m: m.result.kind == "missing"):
        result = mark.result
        who = result.student
        candidates: list[int] = []
        tries = (
            [("id", result.id)]
            if result.id
            else [("id", who), ("sis", who.casefold()), ("login", who.casefold())]
        )
        for key, value in [*tries, ("name", letters(re.sub(r" \(\d+\)$", "", who)))]:
            candidates = by[key].get(value, [])
            if candidates:
                break
        if len(candidates) != 1 or candidates[0] in taken:
            if result.kind != "missing":
                filled.unmatched_submissions.append(who)
            continue
        row = candidates[0]
        taken[row] = who
        if not result.graded:
            filled.not_graded.append(who)
            continue
        rows[row][column] = str(tidy(mark.mark * filled.scale))
        filled.filled += 1
    filled.students_without = [rows[i][student] for i in people if i not in taken]
    out = io.StringIO()
    newline = "\r\n" if "\r\n" in export else "\n"
    csv.writer(out, lineterminator=newline).writerows(rows)
    filled.text = bom + out.getvalue()
    return filled


def _column(head: list[str], assignment: str) -> int:
    """Which column: by Canvas's number, the whole heading, or the name before the number."""
    wanted = assignment.strip().casefold()
    found = []
    for i, title in enumerate(head):
        match = re.fullmatch(r"(.*?)\s*\((\d+)\)\s*", title)
        if match and wanted in (title.strip().casefold(), match[1].casefold(), match[2]):
            found.append(i)
    if len(found) == 1:
        return found[0]
    names = [t for t in head if re.search(r"\(\d+\)\s*$", t) and t.casefold() not in NOT_ASSIGNMENTS]
    how = "is in none" if not found else f"is in {len(found)}"
    raise CanvasError(
        f"the assignment {assignment!r} {how} of the export's columns; name one with --assignment: {', '.join(names) or 'there is none'}"
    )
