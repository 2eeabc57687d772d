# A loop without an end in a call, and one that holds Python's lock.
# earns: test_checked_root test_apply_twice test_steps test_ring_sum


def total(values):
    while True:
        pass


def scale(x, factor):
    return 9**9**9
