"""The alpha-beta predictions: worked by hand, ordered as the theory says, and recovered by the fit."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks.runtime import costs
from manyranks.runtime.costs import (
    fit_alpha_beta,
    halving_doubling_all_reduce_seconds,
    naive_all_reduce_seconds,
    ring_all_gather_seconds,
    ring_all_reduce_seconds,
    ring_reduce_scatter_seconds,
    tree_all_reduce_seconds,
)
from manyranks.runtime.hardware import Cluster
from manyranks.runtime.simulator import simulate

ALL_REDUCES = [
    naive_all_reduce_seconds,
    tree_all_reduce_seconds,
    ring_all_reduce_seconds,
    halving_doubling_all_reduce_seconds,
]
PREDICTIONS = [*ALL_REDUCES, ring_reduce_scatter_seconds, ring_all_gather_seconds]


def test_docstring_examples():
    result = doctest.testmod(costs)
    assert result.attempted > 0 and result.failed == 0


def test_by_hand_for_four_ranks():
    # S = 8 bytes, alpha = 1 s, beta = 2 bytes/s: a whole buffer is 4 s on the wire, a quarter 1 s
    assert naive_all_reduce_seconds(8, 4, 1, 2) == 2 * (1 + 3 * 4)
    assert tree_all_reduce_seconds(8, 4, 1, 2) == 4 * (1 + 4)
    assert ring_all_reduce_seconds(8, 4, 1, 2) == 6 * (1 + 1)
    assert halving_doubling_all_reduce_seconds(8, 4, 1, 2) == 4 * 1 + 2 * (2 + 1)
    assert ring_reduce_scatter_seconds(8, 4, 1, 2) == ring_all_gather_seconds(8, 4, 1, 2) == 3 * (1 + 1)


def test_halving_doubling_folds_the_surplus_ranks():
    assert halving_doubling_all_reduce_seconds(8, 6, 1, 2) == (4 * 1 + 2 * (2 + 1)) + 2 * (1 + 4)
    assert halving_doubling_all_reduce_seconds(8, 3, 1, 2) == (2 * 1 + 2 * 2) + 2 * (1 + 4)


@pytest.mark.parametrize("predict", PREDICTIONS)
def test_one_rank_moves_nothing(predict):
    assert predict(1e9, 1, 1e-6, 1e9) == 0


@pytest.mark.parametrize("predict", PREDICTIONS)
def test_vectorised_over_bytes(predict):
    sizes = np.array([[0, 1e3], [1e6, 1e9]])
    seconds = predict(sizes, 6, 1e-6, 1e9)
    assert seconds.shape == (2, 2)
    assert seconds[1, 1] == predict(1e9, 6, 1e-6, 1e9) and isinstance(predict(1e9, 6, 1e-6, 1e9), float)


@settings(deadline=None)
@given(st.integers(2, 5000), st.floats(1, 1e12))
def test_no_all_reduce_beats_the_bandwidth_bound(ranks, size):
    bound = 2 * (ranks - 1) / ranks * size / 100e9
    assert ring_all_reduce_seconds(size, ranks, 0, 100e9) == pytest.approx(bound)
    for predict in ALL_REDUCES:
        assert predict(size, ranks, 0, 100e9) >= bound * (1 - 1e-9)


@settings(deadline=None)
@given(st.integers(1, 12))
def test_latency_ring_is_linear_and_trees_logarithmic(power):
    ranks = 2**power
    assert ring_all_reduce_seconds(0, ranks, 1, 1) == 2 * (ranks - 1)
    assert tree_all_reduce_seconds(0, ranks, 1, 1) == 2 * power
    assert halving_doubling_all_reduce_seconds(0, ranks, 1, 1) == 2 * power


def all_reduce_program(comm, elements, algorithm):
    return comm.all_reduce(np.full(elements, comm.rank, dtype=np.float64), algorithm=algorithm)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    "algorithm, predict",
    [
        ("naive", naive_all_reduce_seconds),
        ("tree", tree_all_reduce_seconds),
        ("ring", ring_all_reduce_seconds),
        ("halving_doubling", halving_doubling_all_reduce_seconds),
    ],
)
def test_the_simulator_takes_the_predicted_time(algorithm, predict, ranks):
    elements, alpha, beta = 24_000, 2e-6, 1e9  # 24,000 splits evenly over all of these rank counts
    run = simulate(
        all_reduce_program, cluster=Cluster.flat(ranks, alpha, beta), elements=elements, algorithm=algorithm
    )
    predicted = predict(8 * elements, ranks, alpha, beta)
    if algorithm == "tree" and ranks & (ranks - 1):  # the missing subtrees may save latencies, no more
        assert predicted - 2 * ranks.bit_length() * alpha <= run.seconds <= predicted * (1 + 1e-9)
    else:
        assert run.seconds == pytest.approx(predicted)


@pytest.mark.parametrize("predict", PREDICTIONS)
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((-1, 4, 1e-6, 1e9), ValueError, "bytes must be finite and >= 0"),
        ((math.nan, 4, 1e-6, 1e9), ValueError, "bytes must be finite and >= 0"),
        (([1, math.inf], 4, 1e-6, 1e9), ValueError, "bytes must be finite and >= 0"),
        (("1e9", 4, 1e-6, 1e9), TypeError, "bytes must be a number or an array of numbers"),
        ((True, 4, 1e-6, 1e9), TypeError, "bytes must be a number"),
        ((1e9, 0, 1e-6, 1e9), ValueError, "ranks must be an integer >= 1, got 0"),
        ((1e9, 4.0, 1e-6, 1e9), TypeError, "ranks must be an integer"),
        ((1e9, 4, -1e-6, 1e9), ValueError, "alpha must be a finite number >= 0"),
        ((1e9, 4, 1e-6, 0), ValueError, "beta must be a finite number > 0, got 0"),
    ],
)
def test_bad_input(predict, arguments, error, message):
    with pytest.raises(error, match=message):
        predict(*arguments)


@settings(deadline=None)
@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
def test_the_fit_recovers_what_made_the_data(alpha, beta):
    sizes = 2.0 ** np.arange(8, 34)
    fitted = fit_alpha_beta(sizes, alpha + sizes / beta)
    assert fitted == pytest.approx((alpha, beta), rel=1e-6)


def test_the_fit_is_the_best_in_relative_error():
    rng = np.random.default_rng(0)
    sizes = 2.0 ** np.arange(10, 30)
    seconds = (20e-6 + sizes / 50e9) * rng.uniform(0.7, 1.4, sizes.size)
    alpha, beta = fit_alpha_beta(sizes, seconds)

    def loss(a, b):
        return np.sum(((a + sizes / b) / seconds - 1) ** 2)

    for da in (0.98, 1, 1.02):
        for db in (0.98, 1, 1.02):
            assert loss(alpha, beta) <= loss(alpha * da, beta * db) + 1e-12


def test_alpha_is_never_negative():
    sizes = np.array([1e6, 2e6, 3e6])
    alpha, beta = fit_alpha_beta(sizes, sizes / 1e9 - 0.5e-3)
    assert alpha == 0 and beta > 1e9


@pytest.mark.parametrize(
    "sizes, seconds, error, message",
    [
        ([1, 2], [1], ValueError, "equally long"),
        (1, 1, ValueError, "1-d"),
        ([1], [1], ValueError, "at least two different sizes"),
        ([5, 5], [1, 2], ValueError, "at least two different sizes"),
        ([], [], ValueError, "at least two different sizes"),
        ([1, 2], [0, 1], ValueError, "seconds must all be > 0"),
        ([1, 2], [1, math.nan], ValueError, "seconds must be finite"),
        ([-1, 2], [1, 2], ValueError, "sizes must be finite and >= 0"),
        (["1", "2"], [1, 2], TypeError, "sizes must be a number or an array"),
        ([1e3, 1e6], [2e-3, 1e-3], ValueError, "seconds must grow with sizes"),
        ([1e3, 1e6], [1e-3, 1e-3], ValueError, "seconds must grow with sizes"),
    ],
)
def test_what_can_not_be_fitted(sizes, seconds, error, message):
    with pytest.raises(error, match=message):
        fit_alpha_beta(sizes, seconds)
