# ruff: noqa: F821
# The network: addresses far and near, names, the grader's own machine.
# earns: test_total test_checked_root test_apply_twice test_steps test_sizes test_ring_sum test_total_of_other_numbers
import socket


def scale(x, factor):
    targets = [
        ("1.1.1.1", 53),
        ("127.0.0.1", 22),
        ("127.0.0.1", PORT),
        ("::1", PORT),
        ("169.254.169.254", 80),
    ]
    for family in (socket.AF_INET, socket.AF_INET6):
        for target in targets:
            try:
                with socket.socket(family, socket.SOCK_STREAM) as s:
                    s.settimeout(0.2)
                    s.connect(target)
                    print("LEAK: reached", target)
            except OSError:
                pass
    try:
        print("LEAK: resolved", socket.gethostbyname("example.org"))
    except OSError:
        pass
    return 0
