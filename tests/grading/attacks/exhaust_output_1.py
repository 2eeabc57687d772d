# Prints without an end, past Python's own stream, too.
# earns: test_checked_root test_apply_twice test_steps test_ring_sum
import os


def total(values):
    while True:
        print("x" * 10_000)


def scale(x, factor):
    while True:
        os.write(2, b"\0\x1b[31m" * 10_000)
