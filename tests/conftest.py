"""What pytest has to know before it collects, and what several files of tests share."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
collect_ignore = [] if list((ROOT / "labs").glob("*/test_lab.py")) else ["test_labs.py"]


@pytest.fixture(scope="session")
def framework_folder() -> Path:
    """A folder with DeepSpeed, torchtitan and megatron-core, made once; skips where they can't be fetched."""
    listed = ROOT / "tests/fixtures/frameworks.txt"
    key = hashlib.sha256(listed.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = ROOT / "_build" / f"frameworks-{key}"
    if not folder.is_dir():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        done = subprocess.run(
            [*pip, "--target", str(unfinished), "--requirement", str(listed)],
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode:
            pytest.skip(f"the frameworks can't be installed here: {done.stderr.strip().splitlines()[-1]}")
        unfinished.rename(folder)
    return folder


@pytest.fixture
def framework_packages(framework_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed, torchtitan and megatron-core can be imported in this test, behind what .venv has itself."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(framework_folder)])
    # torchtitan's configuration imports kernels, and those Triton, which a CPU's PyTorch lacks; no test runs a kernel
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
