# Answers that upset a comparison: not a number, arrays of objects, dates, strings and structures, negative zero sizes.
# earns: test_apply_twice test_ring_sum
import numpy as np


def total(values):
    return float("nan")


def scale(x, factor):
    return np.array([[object()] * 3] * 2, dtype=object)


def checked_root(x):
    return np.array([("a", 1)], dtype=[("name", "U1"), ("n", "i4")])


def steps(n):
    return np.array(["2026-01-01"], dtype="datetime64[D]")
