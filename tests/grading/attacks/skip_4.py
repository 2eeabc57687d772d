# Raises StopIteration, which would end a loop of the test before its assertions.
# earns: test_scale test_checked_root test_apply_twice test_ring_sum


def total(values):
    raise StopIteration


def steps(n):
    raise GeneratorExit
