"""Honest people: whatever an editor, a browser or an LMS makes of a right answer, it is graded; what can't be run says why."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import zipfile
from pathlib import Path

import pytest

from manyranks.grading import grade

pytestmark = pytest.mark.slow
EVERYTHING = 100
FLOAT32 = """
import numpy as np


def scale(x, factor):
    return (x.astype(np.float32) * np.float32(factor)).astype(np.float32)


def total(values):
    return np.float32(sum(values))
"""
SLOW = """
import time


def steps(n):
    for i in range(n):
        time.sleep(0.1)
        yield i
"""
CHATTY = """
print("hello", "\\udcff".encode("utf-8", "backslashreplace"))
print("x" * 20_000)


def total(values):
    print("adding", values)
    import sys

    print("to the other stream, too", file=sys.stderr)
    return float(sum(values))
"""
USES_MUCH = """
import random
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pool

import numpy as np

np.random.seed(1)


def total(values):
    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(2) as pool:
        file.write(b"notes")
        return float(sum(pool.map(float, values)))


def scale(x, factor):
    assert subprocess.run(["/bin/true"]).returncode == 0
    with open("/tmp/cache.npy", "wb") as file:
        np.save(file, x)
    return np.load("/tmp/cache.npy") * factor
"""


def make(folder: Path, solution: str) -> dict[str, tuple[float, str]]:
    """Write the submissions; for each student the points and what the note or problem says."""
    expected: dict[str, tuple[float, str]] = {}

    def hand_in(
        student: str, files: dict[str, bytes | str], points: float = EVERYTHING, said: str = ""
    ) -> None:
        for name, data in files.items():
            path = folder / student / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.encode() if isinstance(data, str) else data)
        (folder / student).mkdir(exist_ok=True)
        expected[student] = (points, said)

    def zipped(files: dict[str, str]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return out.getvalue()

    hand_in("plain", {"lab.py": solution})
    hand_in("windows", {"lab.py": b"\xef\xbb\xbf" + solution.replace("\n", "\r\n").encode()})
    hand_in("tabs", {"lab.py": solution.replace("    ", "\t")})
    hand_in("float32", {"lab.py": solution + FLOAT32})
    hand_in("slow", {"lab.py": solution + SLOW})
    hand_in("chatty", {"lab.py": solution + CHATTY})
    hand_in("uses-much", {"lab.py": solution + USES_MUCH})
    hand_in("utf-16", {"lab.py": solution.encode("utf-16")}, said="UTF-16")
    hand_in("latin-1", {"lab.py": f"# coding: latin-1\nNAME = 'Zoë'\n{solution}".encode("latin-1")})
    hand_in("Ünïcode Name", {"lab.py": solution + "\nNAME = 'Zoë 日本語'\n"})
    hand_in(
        "extra-files", {"lab.py": solution, "notes.txt": "x", "data/a.csv": "1,2", "picture.png": b"\x89PNG"}
    )
    hand_in(
        "cache",
        {
            "lab.py": solution,
            "__pycache__/lab.cpython-311.pyc": b"\0\1",
            ".DS_Store": b"\0",
            "__MACOSX/lab.py": "no",
        },
    )
    hand_in("with-tests", {"lab.py": solution, "test_lab.py": "raise SystemExit", "README.md": "x"})
    hand_in("in-a-folder", {"lab-01/lab.py": solution}, said="lab-01/lab.py")
    hand_in(
        "zipped",
        {"handin.zip": zipped({"lab-01/lab.py": solution, "__MACOSX/lab-01/._lab.py": "x"})},
        said="unpacked",
    )
    hand_in("renamed", {"lab (2).py": solution}, said="was taken for lab.py")
    hand_in("again", {"lab-1.py": "raise SystemExit", "lab-2.py": solution}, said="lab-2.py was taken")
    hand_in("Capital", {"Lab.PY": solution}, said="was taken for lab.py")
    hand_in("own-name", {"homework.py": solution}, said="only Python file")
    hand_in("helper-not-allowed", {"lab.py": solution, "tools.py": "x = 1"}, said="Not looked at: tools.py")
    hand_in(
        "main-guard", {"lab.py": solution + "\nif __name__ == '__main__':\n    raise SystemExit(input())\n"}
    )

    # what can't be graded has a mark and a reason
    hand_in("empty-file", {"lab.py": "  \n\r\n"}, 0, "is empty")
    hand_in("empty-folder", {}, 0, "folder is empty")
    hand_in("two-labs", {"a/lab.py": solution, "b/lab.py": solution}, 0, "more than one lab.py")
    hand_in("notebook", {"lab.ipynb": "{}"}, 0, "notebook")
    hand_in("no-python", {"answers.docx": b"PK"}, 0, "No Python file")
    hand_in("which-one", {"one.py": solution, "two.py": solution}, 0, "isn't clear which")
    hand_in("not-utf-8", {"lab.py": b"name = 'Zo\xeb'\n" + solution.encode()}, 0, "not UTF-8")
    hand_in("binary", {"lab.py": b"\x7fELF\0\0\1"}, 0, "null bytes")
    hand_in("huge", {"lab.py": "#" * 2_100_000}, 0, "larger than")
    hand_in("bad-zip", {"handin.zip": b"PK\3\4 not really"}, 0, "can't be unpacked")
    hand_in(
        "climbing-zip",
        {"handin.zip": zipped({"../../lab.py": solution, "/etc/lab.py": solution})},
        0,
        "No Python file",
    )
    hand_in("syntax-error", {"lab.py": "def total(values)\n    return 1\n"}, 0, "SyntaxError")
    hand_in("mixed-tabs", {"lab.py": "def f():\n    a = 1\n\tb = 2\n"}, 0, "TabError")
    hand_in("crashes", {"lab.py": solution + "\n1 / 0\n"}, 0, "ZeroDivisionError")
    hand_in(
        "imports-missing", {"lab.py": "import a_module_that_is_not_there\n"}, 0, "a_module_that_is_not_there"
    )
    hand_in("input", {"lab.py": solution + "\ninput('which? ')\n"}, 0, "EOFError")
    hand_in("nearly", {"lab.py": solution.replace("x * factor", "x + factor")}, 85, "")
    hand_in(
        "forgot-one",
        {"lab.py": re.sub(r"def apply_twice.*?\n\n\n", "", solution, flags=re.S)},
        90,
        "no function",
    )
    return expected


@pytest.fixture(scope="module")
def graded(sandbox_mode, little_lab, tmp_path_factory):
    base = tmp_path_factory.mktemp("honest")
    (base / "in").mkdir()
    expected = make(base / "in", (little_lab / "solution.py").read_text())
    roster = base / "roster.csv"
    roster.write_text("student\nplain\nnever-came\n")
    out = base / "out"
    status = grade.main(
        [str(little_lab), str(base / "in"), "--out", str(out), "--roster", str(roster), "--jobs", "2"]
    )
    assert status == 0
    with open(out / "marks.csv", newline="", encoding="utf-8") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    kept = [json.loads(p.read_text()) for p in (out / "state").glob("*.json") if p.name != "plan.json"]
    return expected, rows, {k["result"]["student"]: k["result"] for k in kept}, out


def test_each_gets_the_right_mark_and_reason(graded):
    expected, rows, results, _ = graded
    for student, (points, said) in expected.items():
        assert float(rows[student]["mark"]) == points, (student, results[student]["outcomes"])
        text = " ".join([rows[student]["notes"], *(o["message"] for o in results[student]["outcomes"])])
        assert said in text, (student, text)


def test_who_handed_in_nothing_is_missing(graded):
    _, rows, _, _ = graded
    assert rows["never-came"]["status"] == "missing" and rows["never-came"]["mark"] == "0"


def test_the_table_is_sorted(graded):
    _, rows, _, _ = graded
    assert list(rows) == sorted(rows, key=lambda name: (name.casefold(), name))


def test_what_was_printed_is_on_the_page(graded):
    _, _, results, out = graded
    page = next(out.glob("feedback/chatty-*.html")).read_text()
    assert "adding [1, 2, 3]" in page and "to the other stream, too" in page


def test_where_it_went_wrong_is_told(graded):
    _, _, results, _ = graded
    outcome = results["crashes"]["outcomes"][-1]
    assert "1 / 0" in outcome["where"] and "lab.py, line" in outcome["where"]


def test_nothing_is_left_in_the_folder(graded):
    assert not [
        p for p in os.listdir(graded[3]) if p not in ("state", "marks.csv", "report.html", "feedback")
    ]
