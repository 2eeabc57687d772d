"""Inside the sandbox: the process that a submission's code runs in.

`enter` takes away what the code shall not have; `serve` then answers calls. From there on the process is the
submission's: whatever it writes to the protocol's socket can only be an answer to the call that is being asked, or a
request to one of the functions that came with that call.

Frames: eight bytes of length, then a value of `wire`. The parent sends ``("call", id, name, args, kwargs)``,
``("get", id, name)``, ``("reply", id, value)`` and ``("raise", id, type, message)``. The child sends ``("value", id, value)``, ``("error", id,
type, message, where)`` and ``("ask", id, handle, method, args, kwargs)``; each id is random and good for one answer.
"""

from __future__ import annotations

import builtins
import importlib
import os
import random
import resource
import signal
import socket
import struct
import sys
import traceback
from typing import Any

from manyranks.grading import kernel, wire

__all__ = ["enter", "serve"]

_LENGTH = struct.Struct(">Q")


def enter(config: dict, protocol: int, output: int, uid: int | None, live: int, tmp: str | None) -> None:
    """Leave everything behind that the submission's code shall not have. Raises if any of it fails."""
    limits = config["limits"]
    os.setsid()
    if tmp is None:
        kernel.private_mounts()
        kernel.mount_tmpfs("/tmp", limits["tmp"], 4096)
        kernel.mount_tmpfs("/dev/shm", 1 << 20, 64)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    keep = {config["control"], protocol}  # our caller closes the first, once nothing can fail any more
    for fd in range(3, 1024):
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass
    for name, value in (
        ("CORE", 0),
        ("CPU", limits["cpu_seconds"]),
        ("DATA", limits["memory"]),
        ("AS", 16 * limits["memory"]),
        ("FSIZE", limits["file_size"]),
        ("NOFILE", limits["open_files"]),
        # one user number for each child where we may; else all children of the submission count together
        ("NPROC", limits["processes"] + (2 * live + 4 if uid is None else 0)),
        ("MSGQUEUE", 0),
        ("MEMLOCK", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()
    try:
        kernel.filter_system_calls()
    except kernel.Unsupported:
        if tmp is not None:  # the filter is then all that keeps it from the network
            raise
    kernel.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(0o077)
    os.environ.clear()
    os.environ.update(config["environment"])
    os.environ["TMPDIR"] = os.environ["HOME"] = tmp or "/tmp"
    sys.argv = ["lab.py"]
    sys.path.insert(0, config["lab"])
    os.chdir(config["lab"])


class Gone(BaseException):
    """The parent has closed the connection."""


class Line:
    """The protocol's socket, from this side."""

    def __init__(self, fd: int):
        self.socket = socket.socket(fileno=fd)
        self.current = 0
        self.lab: Any = None

    def read(self) -> tuple:
        (length,) = _LENGTH.unpack(self._exactly(8))
        return wire.decode(self._exactly(length), self.resolve)

    def _exactly(self, n: int) -> bytes:
        parts = []
        while n:
            part = self.socket.recv(min(n, 1 << 20))
            if not part:
                raise Gone
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    def write(self, *message: Any) -> None:
        body = wire.encode(message, self.handle)
        if len(body) > wire.MAX_BYTES:
            raise wire.NotPlain(f"{len(body)} bytes; at most {wire.MAX_BYTES} are taken")
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def ask(self, handle: int, method: str, args: tuple, kwargs: dict) -> Any:
        """Have the parent call `method` of what it knows as `handle`."""
        mine = self.current
        self.write("ask", mine, handle, method, args, kwargs)
        kind, number, *rest = self.read()
        if kind == "raise":
            raise _exception(*rest)
        return rest[0]

    # what has no plain form

    def handle(self, value: Any) -> tuple[str, Any] | None:
        if isinstance(value, RemoteComm):
            return "comm", value._handle
        if isinstance(value, Callback):
            return "callback", value._handle
        return None

    def resolve(self, kind: str, plain: Any) -> Any:
        if kind == "callback":
            return Callback(self, *plain)
        if kind == "comm":
            return RemoteComm(self, *plain)
        if kind == "work":
            return RemoteWork(self, plain)
        if kind == "own":
            return getattr(self.module(), plain)
        raise wire.WireError(f"an unknown handle, {kind!r}")

    def module(self) -> Any:
        if self.lab is None:
            self.lab = importlib.import_module("lab")
        return self.lab


class Callback:
    """A function of the test's, called over there."""

    def __init__(self, line: Line, handle: int, name: str):
        self._line, self._handle, self.__name__ = line, handle, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._line.ask(self._handle, "__call__", args, kwargs)


class RemoteWork:
    """What `isend`, `irecv` and asynchronous collectives return."""

    def __init__(self, line: Line, handle: int):
        self._line, self._handle = line, handle

    def wait(self) -> Any:
        return self._line.ask(self._handle, "wait", (), {})


class RemoteComm:
    """A rank's communicator: every call is made, and counted, in the simulator on the other side of the wall."""

    def __init__(self, line: Line, handle: int, rank: int, size: int, ranks: tuple[int, ...]):
        self._line, self._handle = line, handle
        self.rank, self.size, self.ranks = rank, size, ranks

    @property
    def xp(self) -> Any:
        import array_api_compat.numpy as xp

        return xp

    def copy(self, x: Any) -> Any:
        return x.copy()

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._line.ask(self._handle, name, args, kwargs)

        method.__name__ = name
        return method


def _exception(name: str, message: str) -> Exception:
    kind = getattr(builtins, name, RuntimeError)
    try:
        return kind(message)
    except Exception:
        return RuntimeError(f"{name}: {message}")


def _describe(error: BaseException) -> tuple[str, str, str]:
    """(built-in type, message, where in the submission's own files)."""
    kind = next(
        (k.__name__ for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k), "RuntimeError"
    )
    message = str(error.args[0]) if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
    if isinstance(error, SystemExit):
        kind, message = (
            "RuntimeError",
            f"the code asked Python to exit (SystemExit: {message}); a function returns instead",
        )
    elif not isinstance(error, Exception):
        kind, message = "RuntimeError", f"{type(error).__name__}: {message}"
    elif kind != type(error).__name__:
        message = f"{type(error).__name__}: {message}"
    here = os.getcwd()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(here)]
    where = "\n".join(
        f"{os.path.basename(f.filename)}, line {f.lineno}, in {f.name}: {f.line}" for f in frames[-3:]
    )
    if isinstance(error, SyntaxError):
        where = f"{os.path.basename(error.filename or 'lab.py')}, line {error.lineno}"
    return kind, message[:4000], where[:2000]


def _answer(line: Line, message: tuple) -> tuple:
    kind, number, name, *rest = message
    module = line.module()
    if kind == "get":
        if not hasattr(module, name):
            return "value", number, ("missing", None)
        value = getattr(module, name)
        return "value", number, (("function", None) if callable(value) else ("value", value))
    args, kwargs = rest
    value = getattr(module, name)(*args, **kwargs)
    return "value", number, value


def serve(fd: int) -> None:
    """Answer calls until the parent goes away."""
    line = Line(fd)
    random.seed(0)
    while True:
        try:
            message = line.read()
        except (Gone, ConnectionError):
            return
        line.current = number = message[1]
        try:
            answer = _answer(line, message)
            try:
                line.write(*answer)
                continue
            except wire.NotPlain as error:
                what = "what it returned" if message[0] == "call" else message[2]
                raise TypeError(
                    f"{what} holds {error}, which can't be graded: plain numbers, texts, lists, tuples, dicts and "
                    "NumPy arrays can"
                ) from None
        except (Gone, ConnectionError):
            return
        except BaseException as error:
            try:
                described = _describe(error)
            except BaseException:
                described = (
                    "RuntimeError",
                    f"{type(error).__name__}, without a message that could be read",
                    "",
                )
            line.write("error", number, *described)
