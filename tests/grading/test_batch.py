"""A batch goes on: after an interruption, for one student, when a file or the lab changes, when something is missing."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyranks.grading import batch as batch_module
from manyranks.grading import grade, sandbox
from manyranks.grading.batch import Batch
from manyranks.grading.collect import Submission
from manyranks.grading.lab import Lab, LabError

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def lab(little_lab, tmp_path) -> Path:
    shutil.copytree(little_lab, tmp_path / "lab", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "lab"


def hand_in(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "lab.py").write_text(text)
    return folder


def mounts(pid: str, folder: str) -> bool:
    """Whether a process, not this one, lives in a sandbox that was made of something in `folder`."""
    try:
        return int(pid) != os.getpid() and folder in Path("/proc", pid, "mountinfo").read_text(
            errors="replace"
        )
    except OSError:  # it has just ended
        return False


def table(out: Path) -> dict[str, dict]:
    with open(out / "marks.csv", newline="", encoding="utf-8") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_results_are_kept_until_something_changes(sandbox_mode, lab, tmp_path, monkeypatch, capsys):
    solution = (lab / "solution.py").read_text()
    wrong = solution.replace("x * factor", "x")
    folder = hand_in(tmp_path / "in", ann=solution, bob=wrong)
    out = tmp_path / "out"
    command = [str(lab), str(folder), "--out", str(out), "--jobs", "2"]
    ran: list[str] = []
    real = Batch.grade

    def counted(self, submission):
        ran.append(submission.student)
        return real(self, submission)

    monkeypatch.setattr(Batch, "grade", counted)
    assert grade.main(command) == 0
    assert sorted(ran) == ["ann", "bob"]
    assert {name: row["mark"] for name, row in table(out).items()} == {"ann": "100", "bob": "85"}
    first = (out / "marks.csv").read_bytes()

    ran.clear()
    assert grade.main(command) == 0 and ran == []  # nothing to do, and the same table
    assert (out / "marks.csv").read_bytes() == first

    (folder / "bob" / "lab.py").write_text(solution)
    assert grade.main(command) == 0 and ran == ["bob"]  # another file
    assert table(out)["bob"]["mark"] == "100"

    ran.clear()
    assert grade.main([*command, "--student", "ann"]) == 0 and ran == ["ann"]  # asked for
    assert set(table(out)) == {"ann", "bob"}

    ran.clear()  # a late policy changes marks, and runs nothing
    os.utime(folder / "bob" / "lab.py", (1_900_000_000, 1_900_000_000))
    late = ["--due", "2030-03-16T00:00Z", "--late-policy", "10%/day,max 50%"]
    assert grade.main([*command, *late]) == 0 and ran == []
    assert table(out)["bob"]["mark"] == "80"
    assert grade.main(command) == 0 and table(out)["bob"]["mark"] == "100"  # no stale penalty

    ran.clear()
    test = lab / "test_lab.py"
    test.write_text(test.read_text().replace("points(15)", "points(20)"))
    assert grade.main(command) == 0 and sorted(ran) == ["ann", "bob"]  # another lab
    assert table(out)["ann"]["out_of"] == "110"
    assert grade.main([*command, "--student", "nobody"]) == 2
    assert "no submission of 'nobody'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_batch_resumes(sandbox_mode, lab, tmp_path):
    solution = (lab / "solution.py").read_text()
    slow = solution + "\nimport time\ntime.sleep(2)\n"
    folder = hand_in(tmp_path / "in", aa=solution, bb=slow, cc=slow, dd=solution)
    out, private = tmp_path / "out", tmp_path / "private"
    private.mkdir()
    command = [
        sys.executable,
        "-m",
        "manyranks",
        "grade",
        str(lab),
        str(folder),
        "--out",
        str(out),
        "--jobs",
        "1",
    ]
    env = {**os.environ, "TMPDIR": str(private), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for line in process.stdout:
        if line.startswith("aa"):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "goes on from here" in errors
    left = [entry for entry in os.listdir("/proc") if entry.isdigit() and mounts(entry, str(private))]
    assert left == [], "processes of an interrupted batch"
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "aa" in again.stdout and again.stdout.count("(kept)") >= 1
    assert set(table(out)) == {"aa", "bb", "cc", "dd"}


@pytest.mark.slow
def test_a_failure_of_the_grader_is_told_and_tried_again(sandbox_mode, lab, tmp_path, monkeypatch, capsys):
    solution = (lab / "solution.py").read_text()
    folder = hand_in(tmp_path / "in", ann=solution, bob=solution)
    out = tmp_path / "out"
    command = [str(lab), str(folder), "--out", str(out), "--jobs", "1"]
    real = Batch._run

    def broken(self, files):
        if b"CANARY" in files["lab.py"] and self.__dict__.get("plan") and not broken.done:
            return [{"event": "broken", "message": "no more processes"}], ""
        return real(self, files)

    broken.done = False
    monkeypatch.setattr(Batch, "_run", broken)
    assert grade.main(command) == 3
    rows = table(out)
    assert rows["ann"]["mark"] == "" and rows["ann"]["status"] == "grader"  # no mark, not a zero
    assert "NOT GRADED" in capsys.readouterr().err
    broken.done = True
    assert grade.main(command) == 0 and table(out)["ann"]["mark"] == "100"


def test_a_bug_in_the_grader_stops_nobody_else(sandbox_mode, little_lab, tmp_path, monkeypatch):
    batch = Batch.__new__(Batch)
    batch.lab, batch.jobs, batch.state, batch.lab_digest = Lab(little_lab), 2, tmp_path, "x"
    batch.plan = batch_module.Plan([batch_module.Test("test_lab.py::test_total", 15, "")])
    monkeypatch.setattr(
        Batch, "grade", lambda self, s: 1 / 0 if s.student == "a" else batch_module.Result(s.student)
    )
    first, second = batch.run([Submission("a"), Submission("b")])
    assert first.kind == "grader" and "ZeroDivisionError" in first.problem and second.kind == "ok"


@pytest.mark.slow
def test_a_lab_whose_solution_fails_grades_nobody(sandbox_mode, lab, tmp_path, capsys):
    path = lab / "solution.py"
    path.write_text(path.read_text().replace("x * factor", "x + factor"))
    folder = hand_in(tmp_path / "in", ann="x = 1")
    assert grade.main([str(lab), str(folder), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "own solution fails 1 of 8 tests" in error and "test_scale" in error


def test_without_a_sandbox_nothing_is_graded(little_lab, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "_found", {})
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    folder = hand_in(tmp_path / "in", ann="import os\nos.makedirs('/tmp/never')\n")
    assert grade.main([str(little_lab), str(folder), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "bwrap) is not installed" in error and "apt install bubblewrap" in error
    monkeypatch.setattr(sandbox.platform, "system", lambda: "Darwin")
    assert grade.main([str(little_lab), str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "needs Linux" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, said",
    [
        ("[lab]\nallow_helpers = perhaps\n", "yes or no"),
        ("[limits]\nbananas = 3\n", "unknown limit 'bananas'"),
        ("[limits]\nmemory = much\n", "must be a number"),
        ("[limit]\nmemory = 1\n", "unknown section"),
    ],
)
def test_switches_that_make_no_sense(lab, change, said):
    (lab / "grading.ini").write_text(change)
    with pytest.raises(LabError, match=said):
        Lab(lab)


def test_a_folder_that_is_no_lab(tmp_path, capsys):
    assert grade.main([str(tmp_path), str(tmp_path)]) == 2
    assert "has no lab.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, said",
    [
        (["--jobs", "0"], "at least 1"),
        (["--late-policy", "10%/day"], "needs --due"),
        (["--late-policy", "often"], "can't read 'often'"),
        (["--canvas", "nowhere.csv"], "nowhere.csv"),
        (["--out", "{folder}/out"], "taken for one"),
    ],
)
def test_options_that_make_no_sense(little_lab, tmp_path, capsys, options, said):
    folder = hand_in(tmp_path / "in", ann="x = 1")
    assert grade.main([str(little_lab), str(folder), *(o.format(folder=folder) for o in options)]) == 2
    assert said in capsys.readouterr().err


def test_a_roster_has_a_heading_or_none(tmp_path):
    path = tmp_path / "roster.csv"
    path.write_text("\ufeffstudent,mail\nann,a@x\n\nbob,b@x\n")
    assert grade.read_roster(path) == ["ann", "bob"]
    path.write_text("4711\n4712\n")
    assert grade.read_roster(path) == ["4711", "4712"]


@pytest.mark.slow
def test_many_mixed_submissions(sandbox_mode, lab, tmp_path):
    """24 of eight kinds, four at once: none is lost, each has its own mark. (many_submissions.py grades 200.)"""
    solution = (lab / "solution.py").read_text()
    kinds = {
        "right": (solution, 100),
        "nearly": (solution.replace("x * factor", "x + factor"), 85),
        "stub": ((lab / "lab.py").read_text(), 0),
        "leaves": ("import os\nos._exit(0)\n", 0),
        "syntax": ("def", 0),
        "empty": ("", 0),
        "wrong-ring": (solution.replace("comm.size - 1", "comm.size - 2"), 80),
        "raises": (solution + "\n\ndef steps(n):\n    raise OSError\n", 90),
    }
    folder = tmp_path / "in"
    for name, (text, _) in kinds.items():
        hand_in(folder, **{f"{name}-{i}": text for i in range(3)})
    out = tmp_path / "out"
    assert grade.main([str(lab), str(folder), "--out", str(out), "--jobs", "4"]) == 0
    rows = table(out)
    assert len(rows) == 24
    for student, row in rows.items():
        assert float(row["mark"]) == kinds[student.rsplit("-", 1)[0]][1], (student, row)


@pytest.mark.slow
def test_canvas_from_download_to_import(sandbox_mode, lab, tmp_path, capsys):
    solution = (lab / "solution.py").read_text()
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "doejane_4711_99_lab.py").write_text(solution)
    export = tmp_path / "export.csv"
    export.write_text(
        "Student,ID,SIS Login ID,Section,A little lab (7)\n    Points Possible,,,,10\n"
        '"Doe, Jane",4711,jd,1,\n"Roe, Rich",4712,rr,1,\n'
    )
    command = [str(lab), str(folder), "--out", str(tmp_path / "out"), "--canvas", str(export)]
    assert grade.main([*command, "--assignment", "Lab X"]) == 2
    assert "A little lab (7)" in capsys.readouterr().err
    assert grade.main(command) == 0
    rows = list(csv.reader(io.StringIO((tmp_path / "out" / "canvas.csv").read_text())))
    assert [r[-1] for r in rows] == ["A little lab (7)", "10", "10", ""]
    said = capsys.readouterr().out
    assert "1 marks written" in said and "Roe, Rich" in said
    kept = json.loads(next((tmp_path / "out" / "state").glob("doejane*.json")).read_text())
    assert kept["result"]["id"] == "4711"
