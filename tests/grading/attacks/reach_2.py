# The other submissions: looks for them, and would change them.
# earns: test_total test_checked_root test_apply_twice test_steps test_sizes test_ring_sum test_total_of_other_numbers
import glob
import os


def scale(x, factor):
    places = [
        "..",
        "../..",
        "/lab/..",
        "/tmp",
        "/tmp/..",
        "/proc/self/root",
        "/proc/1/root",
        "/proc/1/cwd",
        "/proc/self/fd",
    ]
    for place in places:
        for path in glob.glob(f"{place}/*/lab.py") + glob.glob(f"{place}/*/*/lab.py"):
            if not os.path.samefile(path, __file__):
                print("LEAK: another submission", path)
        for path in glob.glob(f"{place}/manyranks-*") + glob.glob(f"{place}/state"):
            print("LEAK:", path)
    return 0
