# Returns too much: a huge array, a huge whole number, values nested without an end.
# earns: test_apply_twice test_ring_sum
import numpy as np


def total(values):
    return 7**1_000_000


def scale(x, factor):
    return np.zeros(12_000_000)


def checked_root(x):
    nested = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def steps(n):
    forever = []
    forever.append(forever)
    return forever
