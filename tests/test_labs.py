"""Every lab: its solution passes its tests, the file that a student starts from doesn't, and each typical mistake fails
exactly the tests that it should.

The mistakes are in `tests/labs/<lab>/`, and each one's docstring says ``fails: test_a, test_b``. Below it is a lab.py, or
``CHANGES = [(old, new), ...]``: what is put in place of a part of the lab's solution.py.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LABS = sorted(path.parent for path in ROOT.glob("labs/*/test_lab.py"))
WRONG = sorted(path for lab in LABS for path in (ROOT / "tests" / "labs" / lab.name).glob("*.py"))
FIRST = ROOT / "labs" / "lab-01-parallelism-engine"
each_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
each_mistake = pytest.mark.parametrize("wrong", WRONG, ids=lambda path: f"{path.parent.name}/{path.stem}")


def fails(path: Path) -> set[str]:
    """The tests that a mistake's docstring says it fails."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    found = re.search(r"^fails:\s*(.+(?:\n[ \t]*\S.*)*)", doc, flags=re.MULTILINE)
    assert found, f"{path.name}: its docstring has no line 'fails: test_a, test_b'"
    return {name.strip().rstrip(".") for name in found[1].replace("\n", " ").split(",")}


def handed_in(path: Path) -> str:
    """The text of a lab.py: the file as it is, or the solution with a mistake's CHANGES."""
    text = path.read_text(encoding="utf-8")
    last = ast.parse(text).body[-1]
    if not (isinstance(last, ast.Assign) and ast.unparse(last.targets[0]) == "CHANGES"):
        return text
    text = (ROOT / "labs" / path.parent.name / "solution.py").read_text(encoding="utf-8")
    for old, new in ast.literal_eval(last.value):
        assert text.count(old) == 1, f"{path.name}: the solution has this {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text


@functools.cache
def outcomes(lab: Path, mistakes: bool = False) -> dict[str, dict[str, dict]]:
    """What solution and start, or the mistakes, do to the lab's tests: {file: {test: points, doc, cases, failed}}."""
    with tempfile.TemporaryDirectory() as base:
        orders = {}
        files = {"solution": lab / "solution.py", "lab": lab / "lab.py"}
        if mistakes:
            files = {path.stem: path for path in WRONG if path.parent.name == lab.name}
        for name, path in files.items():
            folder = Path(base, name)
            shutil.copytree(lab, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            (folder / "lab.py").write_text(handed_in(path), encoding="utf-8")
            orders[name] = str(folder)
        Path(base, "orders.json").write_text(json.dumps(orders))
        subprocess.run(
            [sys.executable, ROOT / "tests" / "lab_runner.py", f"{base}/orders.json", f"{base}/out.json"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            check=True,
            timeout=900,
        )
        return json.loads(Path(base, "out.json").read_text())


@each_lab
def test_the_solution_passes(lab):
    tests = outcomes(lab)["solution"]
    assert tests and not [name for name, test in tests.items() if test["failed"]]


@each_lab
def test_the_start_can_be_collected_and_fails_every_test(lab):
    tests = outcomes(lab)["lab"]
    assert set(tests) == set(outcomes(lab)["solution"])
    passed = [name for name, test in tests.items() if not test["failed"]]
    assert not passed, f"the file to start from passes {passed}"


@pytest.mark.slow
@pytest.mark.skipif(FIRST not in LABS, reason="lab 1 is not there")
def test_the_commands_of_lab_1():
    """As its README gives them, in its folder: tests of one's own file, of the solution, and the worked numbers."""

    def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **more}
        env.pop("PYTHONPATH", None)
        return subprocess.run(
            [sys.executable, *command], cwd=FIRST, env=env, capture_output=True, text=True, timeout=300
        )

    pytest_command = ("-m", "pytest", "test_lab.py", "-v", "-p", "no:cacheprovider")
    done = run(*pytest_command)
    assert done.returncode == 1, done.stdout[-3000:]  # 1: ran, with failures
    done = run(*pytest_command, LAB_MODULE="solution")
    assert done.returncode == 0, done.stdout[-3000:]
    done = run("solution.py")
    assert done.returncode == 0 and "112" in done.stdout and "26.25" in done.stdout, done.stdout


@each_lab
def test_the_folder_is_complete(lab):
    missing = [
        name for name in ("README.md", "lab.py", "solution.py", "pytest.ini") if not (lab / name).is_file()
    ]
    assert not missing


@each_lab
def test_every_test_has_points_and_says_what_it_tests(lab):
    tests = outcomes(lab)["solution"]
    assert tests and all(type(test["points"]) is int and test["points"] > 0 for test in tests.values()), tests
    assert sum(test["points"] for test in tests.values()) == 100
    assert not [name for name, test in tests.items() if not test["doc"]]


@each_lab
def test_there_are_five_typical_mistakes(lab):
    assert sum(path.parent.name == lab.name for path in WRONG) >= 5


@pytest.mark.slow
@each_mistake
def test_a_mistake_fails_exactly_its_tests(wrong):
    lab = ROOT / "labs" / wrong.parent.name
    tests = outcomes(lab, mistakes=True)[wrong.stem]
    assert set(tests) == set(outcomes(lab)["solution"]), "it changes which tests there are"
    assert {name for name, test in tests.items() if test["failed"]} == fails(wrong)


@pytest.mark.slow
@pytest.mark.skipif(FIRST not in LABS, reason="lab 1 is not there")
def test_the_grader_agrees_on_lab_1(tmp_path):
    """The same mistakes, through the sandbox: the same tests fail, and the marks follow."""
    from manyranks.grading.batch import Batch
    from manyranks.grading.collect import Submission
    from manyranks.grading.lab import Lab
    from manyranks.grading.sandbox import SandboxUnavailable, find_mode

    try:
        find_mode()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    batch = Batch(Lab(FIRST), tmp_path, jobs=2)
    files = [path for path in WRONG if path.parent.name == FIRST.name]
    wanted = {path.stem: fails(path) for path in files}
    solution = (FIRST / "solution.py").read_bytes()  # the mistakes import what they leave as it is
    texts = {path.stem: handed_in(path).encode() for path in files}
    submissions = [Submission(n, files={"lab.py": t, "solution.py": solution}) for n, t in texts.items()]
    results = list(batch.run(submissions))
    assert [(r.student, r.problem, r.notes) for r in results if r.problem or r.notes] == []
    for result in results:
        failed = {outcome.short: outcome.message for outcome in result.outcomes if not outcome.passed}
        assert set(failed) == wanted[result.student], failed
    assert len(results) == len(wanted)
