"""What students get, and what Gradescope gets."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from manyranks import __main__ as command
from manyranks import __version__
from manyranks.grading import gradescope, release
from manyranks.grading.batch import Batch, Outcome, Result
from manyranks.grading.collect import Submission
from manyranks.grading.lab import Lab, LabError, Plan, Test
from manyranks.grading.sandbox import SandboxUnavailable, find_mode

ROOT = Path(__file__).resolve().parent.parent.parent
LABS = sorted(p.parent for p in ROOT.glob("labs/*/test_lab.py"))


def names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return set(archive.namelist())


def test_a_release_has_no_answers(little_lab, tmp_path):
    target = tmp_path / "lab.zip"
    assert command.main(["release", str(little_lab), "--out", str(target)]) == 0
    inside = {n.removeprefix("lab/") for n in names(target)}
    assert inside == {"README.md", "lab.py", "pytest.ini", "test_lab.py", ".github/workflows/lab.yml"}
    with zipfile.ZipFile(target) as archive:
        assert not any(b"CANARY" in archive.read(n) for n in archive.namelist())


def test_the_released_workflow_is_pinned(little_lab, tmp_path):
    """A course's checks must not break because the package has moved on."""
    text = release.student_files(Lab(little_lab))[".github/workflows/lab.yml"].decode()
    assert f"@v{__version__}" in text and "VERSION" not in text


def test_a_release_is_the_same_every_time(little_lab, tmp_path):
    first, second = tmp_path / "1.zip", tmp_path / "2.zip"
    copy = tmp_path / "lab"
    shutil.copytree(little_lab, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    release.release(Lab(little_lab), first)
    release.release(Lab(copy), second)
    assert first.read_bytes() == second.read_bytes()


def test_a_release_that_needs_the_solution_is_refused(little_lab, tmp_path):
    copy = tmp_path / "lab"
    shutil.copytree(little_lab, copy)
    (copy / "test_lab.py").write_text("from solution import total\n")
    with pytest.raises(LabError, match="test_lab.py imports the solution"):
        release.release(Lab(copy), tmp_path / "x.zip")


@pytest.mark.parametrize("lab", LABS, ids=lambda p: p.name)
def test_every_lab_can_be_released(lab, tmp_path):
    target = tmp_path / "lab.zip"
    inside = set(release.release(Lab(lab), target))
    assert {f"{lab.name}/{n}" for n in ("README.md", "lab.py", "test_lab.py", "pytest.ini")} <= inside
    assert not any("solution" in n or "grading" in n for n in inside)


def test_the_autograder_holds_what_gradescope_asks_for(little_lab, tmp_path):
    first, second = tmp_path / "1.zip", tmp_path / "2.zip"
    for target in (first, second):
        assert command.main(["gradescope", str(little_lab), "--out", str(target)]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert {
        "setup.sh",
        "run_autograder",
        "lab/solution.py",
        "lab/test_grading.py",
        "manyranks/grading/worker.py",
    } <= names(first)
    with zipfile.ZipFile(first) as archive:
        for name in ("setup.sh", "run_autograder"):
            assert archive.read(name).startswith(b"#!/usr/bin/env bash\n")
            assert archive.getinfo(name).external_attr >> 16 & stat.S_IXUSR
            checked = subprocess.run(["bash", "-n"], input=archive.read(name), capture_output=True)
            assert checked.returncode == 0, checked.stderr


def test_results_follow_the_specification():
    plan = Plan([Test("test_lab.py::test_a", 60, "A."), Test("test_grading.py::test_b", 40, "B.")])
    outcomes = [
        Outcome("test_lab.py::test_a", 60, True),
        Outcome("test_grading.py::test_b", 40, False, "expected 3"),
    ]
    found = gradescope.results_json(Result("x", outcomes=outcomes, notes=["a note"], seconds=1.5), plan)
    assert found["score"] == 60 and found["execution_time"] == 1.5 and found["output"] == "a note"
    assert found["stdout_visibility"] == "hidden"
    assert [
        (t["name"], t["score"], t["max_score"], t["status"], t["visibility"]) for t in found["tests"]
    ] == [
        ("test_a", 60, 60, "passed", "visible"),
        ("test_b", 0, 40, "failed", "after_published"),
    ]
    assert "expected 3" in found["tests"][1]["output"]
    assert set(found["tests"][0]) <= {
        *(
            "score",
            "max_score",
            "status",
            "name",
            "name_format",
            "number",
            "output",
            "output_format",
            "tags",
            "visibility",
        ),
    }


@pytest.mark.slow
def test_the_autograder_runs_as_in_its_container(little_lab, tmp_path):
    try:
        find_mode(allow_uid=True)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    source = tmp_path / "source"
    gradescope.autograder(Lab(little_lab), tmp_path / "a.zip", hidden="hidden")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(source)
    (tmp_path / "submission" / "hw").mkdir(parents=True)
    text = (little_lab / "solution.py").read_text().replace("x * factor", "x")
    (tmp_path / "submission" / "hw" / "lab.py").write_text(text)
    results = tmp_path / "results.json"
    run = [sys.executable, "-m", "manyranks.grading.gradescope"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*run, "check", str(source / "lab")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = ["--submission", str(tmp_path / "submission"), "--results", str(results)]
    done = subprocess.run([*run, "run", str(source / "lab"), *given], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert found["score"] == 85 and len(found["tests"]) == 8
    assert {t["name"]: t["visibility"] for t in found["tests"]}["test_total_of_other_numbers"] == "hidden"


HOSTILE_WITHOUT_NAMESPACES = """
import os
import socket
import subprocess


def total(values):
    said = []
    try:
        socket.socket(socket.AF_INET)
        said.append("LEAK: a network socket")
    except OSError:
        pass
    for name in ("solution.py", "test_lab.py"):
        try:
            said.append("LEAK: read " + open(os.path.join(FOLDER, name)).read()[:40])
        except OSError:
            pass
    for pid in (os.getppid(), os.getppid() - 1):
        try:
            os.kill(pid, 9)
            said.append("LEAK: killed the parent")
        except OSError:
            pass
    if os.getuid() == 0:
        said.append("LEAK: is root")
    subprocess.Popen(["/bin/sleep", MARKER], start_new_session=True)
    return "; ".join(said) or "nothing"


def scale(x, factor):
    os._exit(0)
"""


def closed_folders(paths: list[Path]) -> set[Path]:
    """The outermost folders through which other users can't reach `paths`."""
    closed = set()
    for path in paths:
        ways = [p for p in [path, *path.parents] if not p.stat().st_mode & stat.S_IXOTH]
        closed |= set(ways[-1:])
    return closed


def run_where_all_can_read(paths: list[Path], closed: set[Path]) -> None:
    """This file's test of separate users again, with `closed` replaced, for it alone, by open folders that hold `paths`."""
    stage = Path(tempfile.mkdtemp(prefix="opened-"))
    lines = ["set -e"]
    for number, path in enumerate(paths):
        (stage / str(number)).mkdir()
        lines.append(f"mount --rbind {shlex.quote(str(path))} {stage}/{number}")
    lines += [f"mount -t tmpfs -o mode=755 opened {shlex.quote(str(folder))}" for folder in sorted(closed)]
    for number, path in enumerate(paths):
        if closed & {path, *path.parents}:
            where = shlex.quote(str(path))
            lines.append(f"mkdir -p {where} && mount --rbind {stage}/{number} {where}")
    test = f"{Path(__file__)}::test_separate_users_where_there_are_no_namespaces"
    lines.append(f"cd {shlex.quote(str(ROOT))}")
    lines.append(
        f"OPENED=1 exec {shlex.quote(sys.executable)} -m pytest -q -p no:cacheprovider {shlex.quote(test)}"
    )
    unshare = ["unshare", "--mount", "--propagation", "private"]
    try:
        if subprocess.run([*unshare, "true"], capture_output=True).returncode:
            pytest.skip(f"other users can't reach {min(closed)}, and no mount namespace can be made here")
        done = subprocess.run(
            [*unshare, "bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    finally:
        for number in range(len(paths)):
            (stage / str(number)).rmdir()
        stage.rmdir()


@pytest.mark.slow
def test_separate_users_where_there_are_no_namespaces(little_lab, tmp_path):
    """What Gradescope's container falls back to: it needs root, a Python that others may read, and no bubblewrap."""
    if os.geteuid() != 0:
        pytest.skip("only root can start processes of other users")
    closed = closed_folders(needed := [Path(sys.base_prefix), Path(sys.prefix), ROOT])
    if closed and "OPENED" not in os.environ:
        run_where_all_can_read(needed, closed)
        return
    assert not closed
    private = tmp_path / "private"
    shutil.copytree(little_lab, private)
    private.chmod(0o700)
    marker = f"53{os.getpid()}.5"
    batch = Batch(Lab(private), tmp_path / "out", 1, mode="uid")
    text = (private / "solution.py").read_text().replace("CANARY-SOLUTION", "")
    text += f"\nFOLDER, MARKER = {str(private)!r}, {marker!r}\n{HOSTILE_WITHOUT_NAMESPACES}"
    result = batch.grade(Submission("x", files={"lab.py": text.encode()}))
    said = json.dumps([(o.message, o.output) for o in result.outcomes])
    assert "LEAK" not in said and "CANARY" not in said
    passed = {o.short for o in result.outcomes if o.passed}
    assert passed == {"test_checked_root", "test_apply_twice", "test_steps", "test_ring_sum"}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                assert marker not in Path("/proc", entry, "cmdline").read_text(errors="replace")
            except OSError:
                pass


def test_the_sample_workflow_runs_what_the_readme_says():
    text = release.WORKFLOW.read_text()
    assert "pytest test_lab.py -v" in text and "permissions:" in text
