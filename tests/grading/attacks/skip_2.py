# Skips, xfails and exits from inside calls, by the exceptions of pytest and unittest.
# earns: test_apply_twice test_steps test_ring_sum
import unittest

import pytest


def total(values):
    pytest.skip("not this one")


def scale(x, factor):
    raise unittest.SkipTest("nor this")


def checked_root(x):
    pytest.exit("all over", returncode=0)
