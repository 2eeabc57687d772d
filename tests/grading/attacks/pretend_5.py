# A rank program that passes data around the communicator: by files, shared memory, the network and the simulator's own
# parts; and that tries to write down traffic that there wasn't.
# earns: test_total test_scale test_checked_root test_apply_twice test_steps test_sizes test_total_of_other_numbers
import os
import socket
import time


def ring_sum(comm, x):
    mine = f"rank{comm.rank}"
    for folder in ("/tmp", "/dev/shm", "/lab", "/var/tmp", "/run"):
        try:
            with open(f"{folder}/{mine}", "wb") as file:
                file.write(x.tobytes())
        except OSError:
            pass
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{mine}")
    server.listen(4)
    time.sleep(0.2)
    found = {comm.rank: x}
    for other in range(comm.size):
        for folder in ("/tmp", "/dev/shm", "/lab", "/var/tmp", "/run"):
            if other != comm.rank and os.path.exists(f"{folder}/rank{other}"):
                found[other] = x
        try:
            if other != comm.rank:
                socket.socket(socket.AF_UNIX).connect(f"\0rank{other}")
                found[other] = x
        except OSError:
            pass
    if len(found) > 1:
        raise SystemError("LEAK: a rank has reached another one past its communicator")
    for name in ("_log", "engine", "_engine", "traffic", "__class__", "__dict__", "_isend", "__reduce__"):
        try:
            comm._line.ask(comm._handle, name, (), {})
        except Exception:
            pass
    comm.bytes_sent = 80
    return sum(x + 10 * (r - comm.rank) for r in range(comm.size))
