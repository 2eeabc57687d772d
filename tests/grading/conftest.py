"""What the grader's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyranks.grading.sandbox import SandboxUnavailable, find_mode

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def sandbox_mode() -> str:
    """How the sandbox works here; skips, with the reason, where it can't."""
    try:
        return find_mode()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def little_lab() -> Path:
    return HERE / "fixtures" / "lab"
