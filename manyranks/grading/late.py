"""Late policy: computed from when things were due and handed in, each time, so that no stale penalty stays.

>>> policy = Policy.parse("10%/day,max 50%,grace 15min")
>>> policy.factor(3600 * 30)  # 30 hours: two days begun
0.8
>>> policy.factor(600)
1.0
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

__all__ = ["Dates", "LateError", "Policy"]

UNITS = {"min": 60, "minute": 60, "hour": 3600, "h": 3600, "day": 86400, "d": 86400, "week": 604800}


class LateError(ValueError):
    """A policy or a date that can't be read."""


@dataclass(frozen=True)
class Policy:
    """A share of the mark is taken off for each unit begun after the due time, up to a maximum."""

    share: float = 0.0
    unit: float = 86400.0
    most: float = 1.0
    grace: float = 0.0
    text: str = "none"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """``"10%/day"``, with ``max 50%`` (else all of it), ``grace 15min``, separated by commas; ``"none"``; ``"zero"``."""
        if text.strip() in ("", "none"):
            return cls()
        if text.strip() == "zero":
            return cls(1.0, 1.0, 1.0, 0.0, "zero")
        values: dict = {"text": text.strip()}
        for part in text.lower().split(","):
            part = part.strip()
            if m := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%\s*/\s*(\d*)\s*([a-z]+?)s?", part):
                if m[3] not in UNITS:
                    raise LateError(
                        f"late policy: unknown unit {m[3]!r} in {part!r}; there are {', '.join(UNITS)}"
                    )
                values |= {"share": float(m[1]) / 100, "unit": UNITS[m[3]] * float(m[2] or 1)}
            elif m := re.fullmatch(r"max\s*(\d+(?:\.\d+)?)\s*%", part):
                values["most"] = float(m[1]) / 100
            elif (m := re.fullmatch(r"grace\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?", part)) and m[2] in UNITS:
                values["grace"] = float(m[1]) * UNITS[m[2]]
            else:
                raise LateError(
                    f"late policy: can't read {part!r}; write for example '10%/day,max 50%,grace 15min'"
                )
        if "share" not in values:
            raise LateError("late policy: say how much a unit costs, for example '10%/day'")
        if not 0 < values["unit"] or not 0 <= values["share"] <= 1 or not 0 <= values.get("most", 1) <= 1:
            raise LateError("late policy: shares are 0% to 100%, and a unit is longer than nothing")
        return cls(**values)

    def factor(self, seconds_late: float) -> float:
        """What is left of the mark, 0 to 1."""
        if seconds_late <= self.grace or self.share == 0:
            return 1.0
        return round(1.0 - min(self.most, self.share * math.ceil(seconds_late / self.unit)), 6)


def _time(text: str, where: str) -> float:
    text = text.strip()
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00").replace(" UTC", "+00:00"))
    except ValueError:
        raise LateError(
            f"{where}: can't read the time {text!r}; write it as 2026-10-31 23:59 or with a zone, 2026-10-31T23:59+02:00"
        ) from None
    return moment.timestamp()  # without a zone: the clock of the machine that grades


class Dates:
    """When each submission was due and came in.

    From a CSV file with the columns ``student`` (name or LMS number) and ``submitted``, and if wanted ``due`` (an
    extension); else the files' own times. `due` is for all who have no other.
    """

    def __init__(self, due: str | None = None, table: str | Path | None = None):
        self.due = _time(due, "--due") if due else None
        self.rows: dict[str, tuple[float | None, float | None]] = {}
        if table is None:
            return
        with open(table, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = {(name or "").strip().lower(): name for name in reader.fieldnames or []}
            if "student" not in columns or not {"submitted", "due"} & set(columns):
                raise LateError(
                    f"{table}: needs the columns student and submitted (and due), has {', '.join(columns)}"
                )
            for number, row in enumerate(reader, 2):
                where = f"{table}, line {number}"
                values = [row.get(columns.get(name, "")) or "" for name in ("submitted", "due")]
                submitted, own_due = (_time(v, where) if v.strip() else None for v in values)
                self.rows[(row[columns["student"]] or "").strip()] = (submitted, own_due)

    def seconds_late(self, student: str, number: str, file_time: float | None) -> float:
        """How late; 0 if in time, or if nothing says when it was due."""
        submitted, due = self.rows.get(number) or self.rows.get(student) or (None, None)
        due = self.due if due is None else due
        submitted = file_time if submitted is None else submitted
        if due is None or submitted is None:
            return 0.0
        return max(0.0, submitted - due)
