"""The benchmarks run. How fast anything is depends on the machine, and is no test."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import models
from manyranks.runtime.hardware import Cluster
from manyranks.runtime.simulator import simulate

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("ranks, nbytes", [(2, 0), (3, 1000), (9, 10**7)])
def test_the_simpy_models_are_the_same_network(ranks, nbytes):
    alpha, beta, steps = 1e-6, 100e9, 5
    cluster = Cluster.flat(ranks, latency=alpha, bandwidth=beta)
    ours = simulate(models.ring, cluster=cluster, x=models.phantom_of(nbytes), steps=steps).seconds
    assert models.simpy_lean(ranks, steps, nbytes, alpha, beta) == pytest.approx(ours, rel=1e-12)
    assert models.simpy_resources(ranks, steps, nbytes, alpha, beta) == pytest.approx(ours, rel=1e-12)


def test_quick():
    before = {p: p.stat().st_mtime_ns for p in (ROOT / "book").glob("benchmarks.md")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "manyranks to simpy, ports as resources" in done.stdout and "kB" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in (ROOT / "book").glob("benchmarks.md")} == before
