# ruff: noqa: F821
# Leaves processes behind: daemons of their own session that would outlive the grading.
# earns: test_checked_root test_apply_twice test_steps test_ring_sum
import os
import subprocess
import time


def total(values):
    subprocess.Popen(["/bin/sleep", MARKER], start_new_session=True, stdin=subprocess.DEVNULL)
    subprocess.Popen(
        ["/bin/sh", "-c", f"trap '' TERM HUP INT; (sleep {MARKER} &) ; sleep {MARKER}"],
        start_new_session=True,
    )
    return 0


def scale(x, factor):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", MARKER])
        os._exit(0)
    time.sleep(0.1)
    return 0
