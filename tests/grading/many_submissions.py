"""Grades many mixed submissions in one batch, and says whether any was lost, with time and memory.

``python tests/grading/many_submissions.py [HOW_MANY] [JOBS]``; not a test: 200 take minutes.
"""

from __future__ import annotations

import csv
import os
import re
import resource
import sys
import tempfile
import time
from pathlib import Path

from manyranks.grading import grade

HERE = Path(__file__).parent
LAB = HERE / "fixtures" / "lab"
ATTACKS = (
    "leave_1",
    "leave_2",
    "skip_4",
    "pretend_1",
    "pretend_4",
    "tamper_3",
    "read_2",
    "exhaust_files_1",
    "reach_4",
    "tamper_2",
)
POINTS = {
    "test_total": 15,
    "test_scale": 15,
    "test_checked_root": 10,
    "test_apply_twice": 10,
    "test_steps": 10,
    "test_sizes": 10,
    "test_ring_sum": 20,
    "test_total_of_other_numbers": 10,
}


def kinds() -> dict[str, tuple[str, float]]:
    """name: (lab.py, the mark that it has to get). A third honest, a third mistakes, a third attacks."""
    solution = (LAB / "solution.py").read_text()
    found: dict[str, tuple[str, float]] = {
        "right": (solution, 100),
        "prints": (solution + "\nprint('x' * 1000)\n", 100),
        "windows": (solution.replace("\n", "\r\n"), 100),
        "right-again": (solution + "# the same\n", 100),
        "wrong-scale": (solution.replace("x * factor", "x + factor"), 85),
        "wrong-ring": (solution.replace("comm.size - 1", "comm.size - 2"), 80),
        "raises": (solution + "\n\ndef steps(n):\n    raise OSError\n", 90),
        "stub": ((LAB / "lab.py").read_text(), 0),
        "syntax": ("def", 0),
        "empty": ("", 0),
    }
    for name in ATTACKS:
        text = (HERE / "attacks" / f"{name}.py").read_text()
        earns = re.search(r"# earns: (.*)", text)[1]
        mark = 0 if earns == "nothing" else sum(POINTS[t] for t in earns.split())
        found[name] = (f"{solution}\nMARKER = '4321.5'\n{text}", mark)
    return found


def main(how_many: int = 200, jobs: int | None = None) -> int:
    mixed = kinds()
    with tempfile.TemporaryDirectory() as base:
        folder, out = Path(base, "in"), Path(base, "out")
        expected = {}
        for i in range(how_many):
            kind = list(mixed)[i % len(mixed)]
            student = f"{kind}-{i:04d}"
            (folder / student).mkdir(parents=True)
            (folder / student / "lab.py").write_bytes(mixed[kind][0].encode())
            expected[student] = mixed[kind][1]
        began = time.monotonic()
        status = grade.main(
            [str(LAB), str(folder), "--out", str(out), *(["--jobs", str(jobs)] if jobs else [])]
        )
        seconds = time.monotonic() - began
        with open(out / "marks.csv", newline="", encoding="utf-8") as file:
            marks = {row["student"]: float(row["mark"] or "nan") for row in csv.DictReader(file)}
    wrong = {s: (marks.get(s), m) for s, m in expected.items() if marks.get(s) != m}
    own, children = (
        resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(f"exit status {status}; {len(marks)} of {how_many} in the table; wrong marks: {wrong or 'none'}")
    print(
        f"{seconds:.0f} s on {os.cpu_count()} cores, {seconds / how_many:.2f} s for each; load {os.getloadavg()[0]:.1f}"
    )
    print(f"memory: grader {own:.0f} MB, its largest process {children:.0f} MB")
    return 1 if wrong or status or len(marks) != how_many else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
