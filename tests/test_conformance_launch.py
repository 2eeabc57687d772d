"""Every collective on real processes against plain NumPy (`tests/conformance.py`): many cases in one launch a size."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="launch needs PyTorch")

from manyranks.runtime.processes import launch  # noqa: E402

if "conformance" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("conformance", Path(__file__).with_name("conformance.py"))
    sys.modules["conformance"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["conformance"])
conformance = sys.modules["conformance"]

# Every so many-th case: the number shares no factor with those of shapes and dtypes, so each of them stays represented.
THIN = {1: 1, 2: 1, 3: 5, 4: 5, 5: 11, 6: 11, 7: 17, 8: 17}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", THIN)
def test_every_collective(size):
    cases = conformance.all_cases(size, THIN[size])
    run = launch(conformance.run_cases, ranks=size, timeout=120, device="cpu", cases=cases)
    assert not conformance.check_cases(run.results, cases)[:5]


@pytest.mark.parametrize("size", [3, 4])
def test_groups(size):
    cases, groups = conformance.all_cases(size, thin=53), conformance.groups_of(size)
    run = launch(conformance.run_cases, ranks=size, timeout=120, device="cpu", cases=cases, groups=groups)
    for i, members in enumerate(groups):
        case_of = [dict(c, root=c["root"] % len(members)) if "root" in c else c for c in cases]
        assert [r for r in range(size) if run.results[r][i] is not None] == sorted(members)
        got = [run.results[r][i] for r in members]
        assert not conformance.check_cases(got, case_of, members)[:5]


def test_groups_of_groups():
    cases = [c for c in conformance.all_cases(2, thin=53) if not c.get("root")]
    run = launch(conformance.run_nested, ranks=4, timeout=120, device="cpu", cases=cases)
    for members in {tuple(result[0]) for result in run.results}:
        assert not conformance.check_cases([run.results[r][1] for r in members], cases, members)[:5]


def on_two_nodes(comm, cases):
    """As if the ranks were on nodes of two."""
    comm.world.local_size = 2
    return [conformance.call(comm, case) for case in cases]


def test_across_nodes():
    cases = [c for c in conformance.all_cases(4) if c["algorithm"] == "hierarchical"]
    run = launch(on_two_nodes, ranks=4, timeout=120, device="cpu", cases=cases)
    assert not conformance.check_cases(run.results, cases)[:5]
    assert {m.tier for m in run.traffic} == {0, 1}
