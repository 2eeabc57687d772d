"""What `launch` does when something goes wrong: a clear error, soon, and no process left behind.

Each program fails in one way. The others of its ranks wait for it, as they would in earnest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import numpy as np
import pytest

pytest.importorskip("torch", reason="launch needs PyTorch")

from manyranks.runtime import CollectiveMismatchError, LaunchTimeout, RankError, UnreceivedMessageError  # noqa: E402
from manyranks.runtime.processes import launch  # noqa: E402

SOON = 15.0  # seconds on two busy cores; typical is 1
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")


def descendants(pid: int | None = None) -> set[int]:
    """The processes that descend from this one, zombies left out."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"/proc/{entry.name}/stat", encoding="utf-8", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found, seen = set(), {os.getpid() if pid is None else pid}
    while seen:
        seen = {child for child, parent in parents.items() if parent in seen}
        found |= seen
    return found


@pytest.fixture(autouse=True)
def nothing_left(capfd, tmp_path, monkeypatch):
    """After each test: no process, no folder, no noise of torchrun's agent, handlers and environment as before."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before, environment = descendants(), dict(os.environ)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)]
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON + 5
    deadline = time.monotonic() + 3
    while descendants() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not descendants() - before, "processes are left"
    assert not list(folder.iterdir()), "files are left"
    assert {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} == {
        k: v for k, v in environment.items() if k != "PYTEST_CURRENT_TEST"
    }
    assert [
        signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    ] == handlers
    noise = "".join(capfd.readouterr())
    for word in ("elastic", "Traceback", "ChildFailed", "SIGTERM", "Warning", "frame #", "TCPStore"):
        assert word not in noise, noise


@pytest.fixture
def soon():
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


def wait_for_rank_1(comm):
    """What the other ranks do meanwhile."""
    return comm.recv(1) if comm.rank != 1 else None


def test_a_rank_raises(soon):
    def program(comm):
        if comm.rank == 1:
            raise KeyError("no such expert")
        return wait_for_rank_1(comm)

    with pytest.raises(RankError, match=r"rank 1: KeyError: 'no such expert'") as caught:
        launch(program, ranks=3)
    assert caught.value.rank == 1
    assert 'raise KeyError("no such expert")' in caught.value.traceback_text
    assert "rank_process.py" not in caught.value.traceback_text
    assert "torch/" not in caught.value.traceback_text


def test_the_first_of_two_that_raise_is_told(soon):
    def program(comm):
        if comm.rank == 0:
            time.sleep(0.5)
            raise ValueError("late")
        if comm.rank == 1:
            raise ValueError("early")
        return wait_for_rank_1(comm)

    with pytest.raises(RankError, match="rank 1: ValueError: early"):
        launch(program, ranks=3)


def test_a_rank_raises_while_others_are_in_a_collective(soon):
    def program(comm):
        if comm.rank == 2:
            time.sleep(0.3)
            raise RuntimeError("out of luck")
        return comm.all_reduce(comm.xp.ones(1000))

    with pytest.raises(RankError, match="rank 2: RuntimeError: out of luck"):
        launch(program, ranks=3)


@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit(soon, code):
    def program(comm):
        if comm.rank == 1:
            sys.exit(code)
        return wait_for_rank_1(comm)

    with pytest.raises(RankError, match=rf"rank 1: the program called sys.exit\({code}\)"):
        launch(program, ranks=2)


@pytest.mark.parametrize("code", [0, 7])
def test_os_exit(soon, code):
    def program(comm):
        if comm.rank == 1:
            os._exit(code)
        return wait_for_rank_1(comm)

    with pytest.raises(RankError, match=f"rank 1: the process exited with code {code}") as caught:
        launch(program, ranks=2)
    assert caught.value.traceback_text == ""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_signal(soon, name, capfd):
    def program(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(30)
        return wait_for_rank_1(comm)

    with pytest.raises(RankError, match=f"rank 1: the process was killed by {name}"):
        launch(program, ranks=3)
    capfd.readouterr()  # Python's fault handler says where the segmentation fault was, and may


def test_a_hang_ends_at_timeout():
    def program(comm):
        if comm.rank == 0:
            return comm.recv(1)
        if comm.rank == 1:
            comm.barrier()
        if comm.rank == 2:
            time.sleep(60)

    began = time.monotonic()
    with pytest.raises(LaunchTimeout) as caught:
        launch(program, ranks=3, timeout=2.0)
    assert 2 < time.monotonic() - began < SOON
    calls = caught.value.last_calls
    assert sorted(calls) == [0, 1, 2]
    assert calls[0].startswith("recv(src=1), for ") and ", at test_launch_faults.py:" in calls[0]
    assert calls[1].startswith("barrier(), for ")
    assert calls[2] == "none yet"
    assert "timeout=2 s" in str(caught.value) and "rank 0: recv(src=1)" in str(caught.value)


def test_a_hang_that_holds_the_interpreter():
    def program(comm):
        import ctypes

        comm.barrier()
        ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the interpreter lock: no thread of the rank can run

    with pytest.raises(LaunchTimeout) as caught:
        launch(program, ranks=2, timeout=2.0)
    assert caught.value.last_calls[0].startswith("none under way; the last was barrier()")


def test_both_send_first():
    def program(comm):
        comm.send(np.zeros(10), 1 - comm.rank)
        return comm.recv(1 - comm.rank)

    with pytest.raises(LaunchTimeout) as caught:
        launch(program, ranks=2, timeout=2.0)
    assert caught.value.last_calls[0].startswith("send(dst=1), for ")
    assert caught.value.last_calls[1].startswith("send(dst=0), for ")


MISMATCHES = {
    "name": (
        lambda c: c.all_reduce(np.ones(4)),
        lambda c: c.broadcast(np.ones(4)),
        "all_reduce(",
        "broadcast(",
    ),
    "op": (
        lambda c: c.all_reduce(np.ones(4)),
        lambda c: c.all_reduce(np.ones(4), op="max"),
        "op='sum'",
        "op='max'",
    ),
    "root": (lambda c: c.reduce(np.ones(4), 0), lambda c: c.reduce(np.ones(4), 1), "root=0", "root=1"),
    "shape": (
        lambda c: c.all_reduce(np.ones(4)),
        lambda c: c.all_reduce(np.ones(5)),
        "shape=(4,)",
        "shape=(5,)",
    ),
    "same number of elements": (
        lambda c: c.all_reduce(np.ones((2, 3))),
        lambda c: c.all_reduce(np.ones((3, 2))),
        "shape=(2, 3)",
        "shape=(3, 2)",
    ),
    "dtype": (
        lambda c: c.all_reduce(np.ones(4, np.float32)),
        lambda c: c.all_reduce(np.ones(4, np.int32)),
        "dtype=float32",
        "dtype=int32",
    ),
    "algorithm": (
        lambda c: c.all_reduce(np.ones(4), algorithm="tree"),
        lambda c: c.all_reduce(np.ones(4), algorithm="ring"),
        "algorithm='tree'",
        "algorithm='ring'",
    ),
    "collective against barrier": (
        lambda c: c.barrier(),
        lambda c: c.all_gather(np.ones(4)),
        "barrier()",
        "all_gather(",
    ),
    "in the middle": (
        lambda c: [c.all_reduce(np.ones(4)) for _ in range(6)],
        lambda c: [c.all_reduce(np.ones(4), op="max" if i == 3 else "sum") for i in range(6)],
        "op='sum'",
        "op='max'",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatched_collectives_are_told_not_hung_nor_garbled(soon, case):
    first, second, in_first, in_second = MISMATCHES[case]

    def program(comm):
        return first(comm) if comm.rank != 1 else second(comm)

    with pytest.raises(CollectiveMismatchError) as caught:
        launch(program, ranks=2, timeout=30)
    assert (
        f"rank 0 called {in_first}" in str(caught.value) or in_first in str(caught.value).split("rank 1")[0]
    )
    assert in_second in str(caught.value).split("rank 1")[1]


def test_a_mismatch_in_a_group_names_ranks_of_the_run(soon):
    def program(comm):
        group = comm.group([1, 2])
        if group is not None:
            return group.all_reduce(np.ones(3 + group.rank))

    with pytest.raises(
        CollectiveMismatchError, match=r"rank 1 called .*shape=\(3,\).* rank 2 called .*shape=\(4,\)"
    ):
        launch(program, ranks=3, timeout=30)


def test_a_message_that_nobody_receives(soon):
    def program(comm):
        if comm.rank == 0:
            comm.isend(np.ones(3), 1)

    with pytest.raises(UnreceivedMessageError, match=r"rank 0 sent a message to rank 1 .*24 bytes"):
        launch(program, ranks=2)


def test_a_receive_that_nothing_answers(soon):
    def program(comm):
        if comm.rank == 1:
            comm.irecv(0)

    with pytest.raises(UnreceivedMessageError, match="rank 1 posted a receive from rank 0"):
        launch(program, ranks=2)


def test_a_result_that_cannot_be_pickled(soon):
    def program(comm):
        return threading.Lock() if comm.rank == 1 else 0

    with pytest.raises(
        RankError, match="rank 1: TypeError: the program returned a lock that can't be sent back"
    ):
        launch(program, ranks=2)


def test_a_result_that_cannot_be_unpickled(soon):
    def program(comm):
        class Trap:
            def __reduce__(self):
                return (int, ("no number",))

        return Trap() if comm.rank == 1 else 0

    with pytest.raises(RankError, match="rank 1: its result can't be unpickled here .*no number"):
        launch(program, ranks=2)


def test_a_program_that_cannot_be_pickled():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"program \(program\) can't be sent to another process: .*lock"):

        def program(comm):
            return lock

        launch(program, ranks=2)
    with pytest.raises(TypeError, match=r"inputs\[1\] can't be sent"):
        launch(lambda comm, x: x, inputs=[1, lock])
    with pytest.raises(TypeError, match="the argument guard can't be sent"):
        launch(lambda comm, guard: 0, ranks=2, guard=lock)


def test_megabytes_of_output(soon, capfd):
    def program(comm):
        for _ in range(300):
            print("x" * 99_999)
        return comm.rank

    run = launch(program, ranks=2)
    out, err = capfd.readouterr()
    assert run.results == [0, 1]
    assert 2_000_000 <= len(out) < 2_001_000
    for rank in (0, 1):
        assert f"... rank {rank} wrote more than 1 MB to stdout; the rest is not shown" in out


def test_what_was_printed_before_a_failure_is_shown(capfd):
    def program(comm):
        print("step 1 of rank", comm.rank)
        comm.barrier()
        if comm.rank == 1:
            raise ValueError
        return comm.recv(1)

    with pytest.raises(RankError):
        launch(program, ranks=2)
    assert capfd.readouterr().out == "step 1 of rank 0\nstep 1 of rank 1\n"


def test_a_process_that_a_rank_started_ends_too():
    def program(comm):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        comm.barrier()
        return child.pid

    pids = launch(program, ranks=2).results
    time.sleep(0.2)
    assert not set(pids) & descendants(1)


def test_threads_left_behind_do_not_keep_the_run():
    def program(comm):
        threading.Thread(target=time.sleep, args=(100,)).start()
        return comm.rank

    began = time.monotonic()
    assert launch(program, ranks=2).results == [0, 1]
    assert time.monotonic() - began < SOON


def test_a_rank_reads_no_input(soon):
    with pytest.raises(RankError, match="EOFError"):
        launch(lambda comm: input("name? "), ranks=2)


SCRIPT = """
import os, signal, subprocess, sys, time
import numpy as np
from manyranks import launch

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

def program(comm):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    comm.barrier()
    if comm.rank == 0:
        open(sys.argv[1], "w").write("up")
    time.sleep(100)

launch(program, ranks=2)
"""


@pytest.fixture
def running(tmp_path):
    """A script in the middle of its launch, in a process of its own, and the processes that it has."""
    script, flag = tmp_path / "script.py", tmp_path / "flag"
    script.write_text(SCRIPT)
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, str(script), str(flag)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": tempfile.gettempdir()},
    )
    try:
        deadline = time.monotonic() + 40
        while not flag.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert flag.exists()
        family = descendants(parent.pid)
        assert len(family) >= 4
        yield parent, family
    finally:
        parent.kill()
        parent.wait()
        parent.stderr.close()


def all_gone(family: set[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not family & descendants(1):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_and_goes_on_up(running):
    parent, family = running
    parent.send_signal(signal.SIGINT)
    _, err = parent.communicate(timeout=SOON)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert all_gone(family)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_do_not_outlive_the_launching_process(running, how):
    parent, family = running
    parent.send_signal(how)
    parent.wait(timeout=SOON)
    assert all_gone(family)


BAD = [
    (dict(ranks=0), ValueError, "ranks must be an integer >= 1, got 0"),
    (dict(ranks=-2), ValueError, "ranks"),
    (dict(ranks=True), TypeError, "ranks must be an integer >= 1, got True"),
    (dict(ranks=2.0), TypeError, "ranks"),
    (dict(ranks=3, inputs=[1, 2]), ValueError, "inputs must have one entry for each of the 3 ranks, got 2"),
    (dict(inputs=[]), ValueError, "inputs must have at least one"),
    (dict(ranks=2, inputs="ab"), TypeError, "inputs must be a list or tuple"),
    (dict(inputs=iter([1, 2])), TypeError, "inputs must be a list or tuple"),
    (dict(ranks=2, timeout=0), ValueError, "timeout must be a finite number > 0, got 0"),
    (dict(ranks=2, timeout=-1), ValueError, "timeout"),
    (dict(ranks=2, timeout=float("nan")), ValueError, "timeout"),
    (dict(ranks=2, timeout=float("inf")), ValueError, "timeout"),
    (dict(ranks=2, timeout="60"), TypeError, "timeout"),
    (dict(ranks=2, device="tpu"), ValueError, "device must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
]


@pytest.mark.parametrize("arguments, kind, message", BAD, ids=[str(b[0]) for b in BAD])
def test_bad_input(arguments, kind, message):
    with pytest.raises(kind, match=message.replace("(", r"\(")):
        launch(lambda comm, *a: None, **arguments)


def test_a_program_that_is_no_function():
    with pytest.raises(TypeError, match="program must be a function of a communicator, got 3"):
        launch(3, ranks=2)

    def generator(comm):
        yield comm.rank

    with pytest.raises(TypeError, match="program must be a plain function"):
        launch(generator, ranks=2)


def test_without_torch(tmp_path):
    script = textwrap.dedent("""
        import sys
        sys.modules["torch"] = None
        import manyranks
        try:
            manyranks.launch(print, ranks=2)
        except ImportError as error:
            print(error)
    """)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=os.getcwd(), timeout=60
    )
    assert "pip install 'manyranks[torch]'" in run.stdout, run.stderr


def test_importing_the_package_does_not_import_torch():
    script = "import sys, manyranks, manyranks.runtime; manyranks.launch; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=os.getcwd(), timeout=60
    )
    assert run.stdout.strip() == "False", run.stderr
