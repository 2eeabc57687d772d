"""Inside the sandbox: imports NumPy and the package once, then forks a child for each one that is asked for.

Started by `sandbox` as ``python -m manyranks.grading.zygote CONFIG``, which names the control socket's file descriptor.
No code of the submission runs here. Each child is a process tree of its own: a new process number space (in which it is
number 1, so that ending it ends all that it has started), its own /tmp, network and shared memory, and its own user
number where the grader is root. Two children of one submission, the ranks of one program, can't reach each other.

Messages on the control socket, one JSON object each: ``{"spawn": id}`` with two file descriptors (the protocol, the
output), ``{"kill": pid}``; back come ``started``, ``exited`` and ``failed``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile

from manyranks.grading import child, kernel

NAMESPACES = (
    kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS
)


def say(control: socket.socket, **message: object) -> None:
    control.send(json.dumps(message).encode())


def main() -> None:
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=config["control"])
    for name in config["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:  # the lab's own solution will say it better
            print(f"preload of {name}: {error}", file=sys.stderr)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    say(control, ready=True)
    used: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 65536, 2)
        if not data:
            break  # the grader is gone, or done with us; what is in a process space of ours ends with us
        message = json.loads(data)
        if "kill" in message:
            try:
                os.kill(message["kill"], signal.SIGKILL)
            except ProcessLookupError:
                pass
        else:
            if os.fork() == 0:
                keep(config, control, message["spawn"], message["live"], fds)
            if config["mode"] == "uid":
                used.add(config["uid"] + message["spawn"] % config["uids"])
            for fd in fds:
                os.close(fd)
    if config["mode"] == "uid":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for uid in used:
            sweep(uid)
    os._exit(0)


def keep(config: dict, control: socket.socket, number: int, live: int, fds: list[int]) -> None:
    """The keeper of one child: makes its namespaces, starts it, waits for it and says how it ended."""
    apart = config["mode"] != "uid"
    uid = config["uid"] + number % config["uids"] if config["uid"] else None
    tmp = None
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if apart:
            kernel.unshare(NAMESPACES)
        else:
            tmp = tempfile.mkdtemp(prefix="child-")
            os.chown(tmp, uid, uid)
        pid = os.fork()
        if pid == 0:
            try:
                child.enter(config, fds[0], fds[1], uid, live, tmp)
            except BaseException as error:
                say(control, failed=number, why=f"{type(error).__name__}: {error}")
                os._exit(70)
            control.close()
            child.serve(fds[0])
            os._exit(0)
        for fd in fds:
            os.close(fd)
        say(control, started=number, pid=pid)
        _, status = os.waitpid(pid, 0)
        if not apart:
            sweep(uid)
            shutil.rmtree(tmp, ignore_errors=True)
        say(control, exited=number, status=os.waitstatus_to_exitcode(status))
    except BaseException as error:
        say(control, failed=number, why=f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def sweep(uid: int) -> None:
    """End all that the user `uid` still runs: where there is no process space of its own to take them along."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
