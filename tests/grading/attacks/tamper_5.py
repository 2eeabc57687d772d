# ruff: noqa: F821
# Raises the test's own kinds of exception, with hostile messages and attributes.
# earns: test_apply_twice test_steps test_ring_sum


class Sneaky(ValueError):
    def __str__(self):
        raise RuntimeError("no message for you")


class Quiet(AssertionError):
    __traceback__ = None

    def __str__(self):
        return "negative" * 100_000


def total(values):
    raise Sneaky


def scale(x, factor):
    raise Quiet


def checked_root(x):
    raise ExceptionGroup("negative", [ValueError("negative")]) if x < 0 else Sneaky()
