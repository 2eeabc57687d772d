"""Every lab: its solution passes its tests, and the file that a student starts from doesn't."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LABS = sorted(path.parent for path in ROOT.glob("labs/*/test_lab.py"))
each_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)


def run_tests(lab: Path, module: str) -> subprocess.CompletedProcess[str]:
    """The lab's own command, in the lab's own folder, as its README gives it."""
    env = {**os.environ, "LAB_MODULE": module, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "test_lab.py", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=lab, env=env, capture_output=True, text=True, timeout=300)


@each_lab
def test_the_solution_passes(lab):
    done = run_tests(lab, "solution")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@each_lab
def test_the_start_fails_and_can_be_collected(lab):
    done = run_tests(lab, "lab")
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-1000:]  # 1: ran, with failures


@each_lab
def test_the_folder_is_complete(lab):
    missing = [name for name in ("README.md", "lab.py", "solution.py") if not (lab / name).is_file()]
    assert not missing
