# Recursion without an end, with Python's limit and without one.
# earns: test_apply_twice test_steps test_ring_sum
import sys


def total(values):
    return total(values)


def scale(x, factor):
    sys.setrecursionlimit(10**9)
    return eval("(" * 50 + "scale(x, factor)" + ")" * 50, {"scale": scale, "x": x, "factor": factor})


def checked_root(x):
    sys.setrecursionlimit(10**9)
    deep = []
    for _ in range(10**6):
        deep = [deep]
    return repr(deep)
