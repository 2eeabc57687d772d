"""Every collective of the simulator against plain NumPy (`tests/conformance.py`), and arrays of any shape by hypothesis."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks.runtime.comm import ALGORITHMS
from manyranks.runtime.hardware import Cluster
from manyranks.runtime.simulator import simulate

if "conformance" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("conformance", Path(__file__).with_name("conformance.py"))
    sys.modules["conformance"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["conformance"])
conformance = sys.modules["conformance"]

SIZES = (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("size", SIZES)
def test_every_collective(size):
    cases = conformance.all_cases(size)
    run = simulate(conformance.run_cases, ranks=size, cases=cases)
    assert not conformance.check_cases(run.results, cases)[:5]


@pytest.mark.parametrize("size", SIZES)
def test_groups(size):
    cases, groups = conformance.all_cases(size, thin=53), conformance.groups_of(size)
    run = simulate(conformance.run_cases, ranks=size, cases=cases, groups=groups)
    for i, members in enumerate(groups):
        case_of = [dict(c, root=c["root"] % len(members)) if "root" in c else c for c in cases]
        assert [r for r in range(size) if run.results[r][i] is not None] == sorted(members)
        got = [run.results[r][i] for r in members]
        assert not conformance.check_cases(got, case_of, members)[:5]


@pytest.mark.parametrize("size", [4, 7, 8])
def test_groups_of_groups(size):
    cases = [c for c in conformance.all_cases(2, thin=53) if not c.get("root")]
    run = simulate(conformance.run_nested, ranks=size, cases=cases)
    for members in {tuple(result[0]) for result in run.results}:
        assert not conformance.check_cases([run.results[r][1] for r in members], cases, members)[:5]


@pytest.mark.parametrize("nodes, gpus", [(2, 2), (2, 4), (4, 2), (3, 2)])
def test_across_nodes(nodes, gpus):
    cases = [
        c for c in conformance.all_cases(nodes * gpus, thin=7) if c["name"] in ("all_reduce", "broadcast")
    ]
    run = simulate(conformance.run_cases, cluster=Cluster(nodes=nodes, gpus_per_node=gpus), cases=cases)
    assert not conformance.check_cases(run.results, cases)[:5]


@given(
    size=st.integers(1, 8),
    name=st.sampled_from(sorted(ALGORITHMS)),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from([*conformance.DTYPES, "int8", "uint16", "float16"]),
    uneven=st.booleans(),
    choose=st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_any_shape(size, name, shape, dtype, uneven, choose):
    variant = choose.choice(list(conformance.variants(name, size)))
    uneven = uneven and name in ("all_gather", "gather")
    case = {
        "name": name,
        "shape": shape,
        "dtype": dtype,
        "uneven": uneven,
        **variant,
        "async": choose.random() < 0.3,
    }
    if conformance.allowed(case):
        run = simulate(conformance.run_cases, ranks=size, cases=[case])
        assert not conformance.check_cases(run.results, [case])


@given(
    size=st.integers(1, 9),
    length=st.integers(0, 40),
    algorithm=st.sampled_from(["ring", "tree", "halving_doubling", "hierarchical", "naive"]),
)
@settings(max_examples=200, deadline=None)
def test_all_reduce_sends_what_the_algorithm_says(size, length, algorithm):
    """Total bytes, whatever the remainders: 2·S·(N-1) for ring, tree and naive."""
    run = simulate(lambda comm, x: comm.all_reduce(x, algorithm=algorithm), inputs=[np.ones(length)] * size)
    if algorithm != "halving_doubling" or size & (size - 1) == 0:
        assert run.traffic.bytes == 2 * 8 * length * (size - 1)
    for result in run.results:
        assert np.array_equal(result, np.full(length, size))
