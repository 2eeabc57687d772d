"""What the README shows runs as it stands, and says what comes out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_taste_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    (tmp_path / "taste.py").write_text(
        code
        + """
    run = simulate(ring_all_reduce, cluster=cluster, inputs=xs)
    assert set(run.bytes_sent) == {7_000_000}, run.bytes_sent
    assert all((result == 28).all() for result in run.results)
""",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "taste.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    simulated, launched = done.stdout.strip().splitlines()[-2:]
    assert "8 ranks" in simulated and "2 ranks" in launched


def test_its_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
