"""Outside: starts the sandbox, asks for children, talks to them and ends them.

The sandbox is bubblewrap: a file system of the system's programs and Python, read-only, the submission's files and
nothing else; no network; no view of any other process. One sandbox a submission; in it a `zygote` that forks children.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from manyranks.grading import wire
from manyranks.grading.bubblewrap import INSTALL, SandboxUnavailable, command, environment

__all__ = ["Child", "Fault", "Limits", "Sandbox", "SandboxUnavailable", "find_mode"]

UID, LAST_UID = 61184, 65519  # numbers that systems keep free for users that come and go
UIDS = 64  # of them for each sandbox
PAUSES = (0.2, 1.0, 4.0)  # seconds, before a child that this machine could not start is asked for again
CHILD_LIMIT = 256
_LENGTH = struct.Struct(">Q")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a submission may use. Bytes, seconds; of one child unless said otherwise."""

    call_seconds: float = 10.0  # of one call, while the grader waits for it
    test_seconds: float = 60.0  # of one test with all its calls
    submission_seconds: float = 300.0
    cpu_seconds: int = 60
    memory: int = 1_000_000_000  # of one process, and of all together
    processes: int = 16
    open_files: int = 128
    file_size: int = 32_000_000
    tmp: int = 64_000_000
    output: int = 1_000_000  # printed by one child; more ends it
    kept_output: int = 6_000  # of that shown to the student, half from the beginning and half from the end


class Fault(Exception):
    """The child is gone, or has been ended. `kind` is one word, the message is for the student."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


# ---------------------------------------------------------------------------------------------------- which sandbox

_found: dict[bool, str] = {}


def find_mode(allow_uid: bool = False) -> str:
    """ "root" or "user": how bubblewrap works here, tried by starting a child.

    `allow_uid`: take "uid", separate users without namespaces, where bubblewrap doesn't work. Only for a container that
    is thrown away after one submission (Gradescope's).

    Raises: SandboxUnavailable.
    """
    if allow_uid in _found:
        return _found[allow_uid]
    failures = []
    if platform.system() != "Linux":
        raise SandboxUnavailable(
            f"The grader's sandbox needs Linux, and this is {platform.system()}. {INSTALL}"
        )
    modes = (
        (["root"] if os.geteuid() == 0 else [])
        + ["user"]
        + (["uid"] if allow_uid and os.geteuid() == 0 else [])
    )
    if shutil.which("bwrap") is None:
        failures.append("bubblewrap (the program bwrap) is not installed")
        modes = [m for m in modes if m == "uid"]
    for mode in modes:
        with tempfile.TemporaryDirectory() as staged:
            # a module that nobody has loaded yet: whether a child can read Python's own
            Path(staged, "lab.py").write_text("import colorsys\n\n\ndef f():\n    return colorsys.__name__\n")
            os.chmod(staged, 0o755)
            os.chmod(Path(staged, "lab.py"), 0o644)
            try:
                with Sandbox(staged, Limits(), mode=mode) as sandbox:
                    child = sandbox.spawn()
                    child.send(wire.encode(("call", 0, "f", (), {})))
                    answer = wire.decode(child.receive())
                    if answer != ("value", 0, "colorsys"):
                        raise SandboxUnavailable(f"a child can't read Python's modules: {answer}")
                _found[allow_uid] = mode
                return mode
            except (SandboxUnavailable, Fault, OSError) as error:
                failures.append(f"as {mode}: {error}")
    raise SandboxUnavailable(
        "No sandbox, so nothing is graded: submissions are programs of people you may not trust, and without one they "
        f"could read the solutions or change marks. What was missing: {'; '.join(failures)}. {INSTALL}"
    )


# ---------------------------------------------------------------------------------------------------- one submission


class _Users:
    """User numbers, UIDS from `first`, that no other sandbox on this machine has while this one lives.

    Held by a Unix socket in the abstract namespace, whose name the kernel frees when its owner ends, however it ends.
    Where all are taken, two sandboxes share some; then their children count together against the limit of processes.
    """

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        for self.first in range(UID, LAST_UID - UIDS, UIDS):
            try:
                self.socket.bind(f"\0manyranks-users-{self.first}")
                break
            except OSError:
                continue

    def close(self) -> None:
        self.socket.close()


class Sandbox:
    """The sandbox of one submission, whose files are in the folder `staged` (named lab.py and so on)."""

    def __init__(
        self, staged: str | Path, limits: Limits, preload: tuple[str, ...] = (), mode: str | None = None
    ):
        self.limits, self.mode = limits, mode or find_mode()
        self.children: dict[int, Child] = {}
        self.news: dict[int, dict] = {}
        self.pids: dict[int, int] = {}
        self.number = 0
        self.users = _Users() if self.mode == "root" else None
        uid, uids = (self.users.first, UIDS) if self.users else (0, 0)
        if self.mode == "uid":  # alone in its container
            uid, uids = UID, LAST_UID - UID
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = json.dumps(
            {
                "control": theirs.fileno(),
                "mode": self.mode,
                "limits": dataclasses.asdict(limits),
                "preload": ["numpy", "array_api_compat.numpy", "manyranks.runtime", *preload],
                "lab": str(staged) if self.mode == "uid" else "/lab",
                "uid": uid,
                "uids": uids,
                "environment": {k: v for k, v in environment().items() if k != "PYTHONPATH"},
            }
        )
        self.errors = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                command(self.mode, str(staged), config),
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env={**environment(), "PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                start_new_session=True,
            )
        finally:
            theirs.close()
        ready = self._hear(30.0)
        if not ready or "ready" not in ready:
            self.close()
            raise SandboxUnavailable(f"the sandbox doesn't start: {self.complaints or 'no answer in 30 s'}")
        self.base = max(_held(pid, "status", "RssAnon:", "RssShmem:") for pid in self.processes())

    def _hear(self, seconds: float) -> dict | None:
        """The next control message, filed under its child."""
        if not select.select([self.control], [], [], seconds)[0]:
            return None
        try:
            data = self.control.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._read_errors()
            return None
        message = json.loads(data)
        for word in ("exited", "failed"):
            if word in message:
                self.news[message[word]] = message
        if "started" in message:
            self.pids[message["started"]] = message["pid"]
        return message

    complaints = ""

    def _read_errors(self) -> None:
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            pass
        self.errors.seek(0)
        self.complaints = self.errors.read(4000).decode("utf-8", "replace").strip()

    def spawn(self) -> Child:
        """A fresh child; no code of the submission has run in it. Tried again while the machine can't make one."""
        if len(self.children) >= CHILD_LIMIT:
            raise Fault("processes", f"the test asked for more than {CHILD_LIMIT} ranks at once")
        for pause in PAUSES:
            try:
                return self._spawn()
            except SandboxUnavailable:
                if self.process.poll() is not None:
                    raise
            time.sleep(pause)
        return self._spawn()

    def _spawn(self) -> Child:
        self.number += 1
        number = self.number
        ours, theirs = socket.socketpair()
        out, printed = os.pipe()
        try:
            order = json.dumps({"spawn": number, "live": len(self.children)}).encode()
            socket.send_fds(self.control, [order], [theirs.fileno(), printed])
        except OSError:
            os.close(out)
            ours.close()
            raise SandboxUnavailable("the sandbox is gone") from None
        finally:
            theirs.close()
            os.close(printed)
        end = time.monotonic() + 20
        while number not in self.pids and number not in self.news:
            if self._hear(max(0.0, end - time.monotonic())) is None:
                break
        if number not in self.pids:
            os.close(out)
            ours.close()
            raise SandboxUnavailable(
                f"no child: {self.news.get(number, {}).get('why') or self.complaints or 'no answer'}"
            )
        child = self.children[number] = Child(self, number, ours, out)
        return child

    def ended(self, number: int, seconds: float) -> dict | None:
        """How child `number` ended, waiting so long for the news."""
        end = time.monotonic() + seconds
        while number not in self.news:
            left = end - time.monotonic()
            if left <= 0 or self._hear(left) is None:
                break
        return self.news.get(number)

    def end(self, number: int) -> None:
        if number in self.children:
            del self.children[number]
            while select.select([self.control], [], [], 0)[0] and self._hear(0):
                pass
            if number not in self.news:
                try:
                    self.control.send(json.dumps({"kill": self.pids[number]}).encode())
                except OSError:
                    pass

    def processes(self) -> list[int]:
        """The processes in the sandbox, the starting one first."""
        found = [self.process.pid]
        for pid in found:  # grows as it goes
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as file:
                        found += [int(p) for p in file.read().split()]
            except (OSError, ValueError):
                continue
        return found

    def uses_too_much(self) -> bool:
        """Whether all processes together hold more memory than one may: pages that no file backs, each counted once."""
        pids = self.processes()
        # without asking for shares, which takes the kernel long: what each holds beyond what the zygote left it
        rough = sum(max(0, _held(pid, "status", "RssAnon:", "RssShmem:") - self.base) for pid in pids)
        if rough <= self.limits.memory:
            return False
        return (
            sum(_held(pid, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:") for pid in pids) - self.base
            > self.limits.memory
        )

    def close(self) -> None:
        """End everything in it."""
        for child in list(self.children.values()):
            child.kill()
        if self.mode == "uid":
            deadline = time.monotonic() + 5
            for number in self.pids:
                while number not in self.news and time.monotonic() < deadline:
                    if self._hear(deadline - time.monotonic()) is None:
                        break
        self.control.close()
        if self.mode == "uid":  # the zygote ends by itself, when it has swept
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                pass
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, signal_number)
            except (ProcessLookupError, PermissionError):
                pass
            try:
                self.process.wait(1 if signal_number == signal.SIGTERM else 10)
                break
            except subprocess.TimeoutExpired:
                continue
        self.errors.close()
        if self.users:
            self.users.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _held(pid: int, file: str, *names: str) -> int:
    """The sum of some lines of a file of /proc, in bytes; 0 for a process that is gone."""
    total = 0
    try:
        with open(f"/proc/{pid}/{file}") as lines:
            for line in lines:
                if line.startswith(names):
                    total += int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return total


class Child:
    """One process of a submission, and what hangs on it."""

    def __init__(self, sandbox: Sandbox, number: int, ours: socket.socket, out: int):
        self.sandbox, self.number, self.socket, self.out = sandbox, number, ours, out
        self.limits = sandbox.limits
        self.socket.setblocking(False)
        os.set_blocking(out, False)
        self.printed = 0
        self.output, self.tail = bytearray(), b""
        self.pending = bytearray()
        self.alive = True
        self.waited = 0.0

    # -- talking

    def send(self, body: bytes) -> None:
        """One frame."""
        view = memoryview(_LENGTH.pack(len(body)) + body)
        while view:
            self._wait(select.POLLOUT)
            try:
                view = view[self.socket.send(view[: 1 << 20]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._gone() from None

    def receive(self) -> bytes:
        """The next frame. Raises Fault when the child has died, is out of time, or breaks a limit."""
        while True:
            if len(self.pending) >= 8:
                (length,) = _LENGTH.unpack(self.pending[:8])
                if length > wire.MAX_BYTES:
                    raise self.fault(
                        "protocol", f"an answer of {length:,} bytes; at most {wire.MAX_BYTES:,} are taken"
                    )
                if len(self.pending) >= 8 + length:
                    body = bytes(self.pending[8 : 8 + length])
                    del self.pending[: 8 + length]
                    return body
            self._wait(select.POLLIN)
            try:
                part = self.socket.recv(1 << 20)
            except BlockingIOError:
                continue
            except OSError:
                part = b""
            if not part:
                raise self._gone()
            self.pending += part

    def _wait(self, event: int) -> None:
        """Until the socket is ready; meanwhile read what is printed, and watch time and memory."""
        poll = select.poll()
        poll.register(self.socket, event)
        if self.out >= 0:
            poll.register(self.out, select.POLLIN)
        began = looked = time.monotonic()
        while True:
            ready = dict(poll.poll(100))
            now = time.monotonic()
            if self.out in ready and not self._read_output():
                poll.unregister(self.out)
                os.close(self.out)
                self.out = -1
            if self.socket.fileno() in ready:
                self.waited += now - began
                return
            if self.waited + now - began > self.limits.call_seconds:
                seconds = f"{self.limits.call_seconds:g} s"
                raise self.fault(
                    "time",
                    f"a call took longer than {seconds} and was ended. Is there a loop without an end?",
                )
            if now - looked > 0.2:
                looked = now
                if self.sandbox.uses_too_much():
                    for other in list(self.sandbox.children.values()):
                        other.kill()
                    raise self.fault(
                        "memory",
                        f"the code used more than {self.limits.memory / 1e6:,.0f} MB of memory and was ended",
                    )

    def _read_output(self) -> bool:
        try:
            part = os.read(self.out, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.printed += len(part)
        self._keep(part)
        if self.printed > self.limits.output:
            raise self.fault(
                "output", f"the code printed more than {self.limits.output / 1e6:g} MB and was ended"
            )
        return bool(part)

    def _keep(self, part: bytes) -> None:
        """The beginning and the end of what is printed."""
        half = self.limits.kept_output // 2
        room = half - len(self.output)
        self.output += part[:room] if room > 0 else b""
        self.tail = (self.tail + part[max(room, 0) :])[-half:]

    # -- ending

    def fault(self, kind: str, message: str) -> Fault:
        self.kill()
        return Fault(kind, message)

    def _gone(self) -> Fault:
        news = self.sandbox.ended(self.number, 2.0)
        self.kill()
        if news is None:
            return Fault("closed", "the code closed its connection to the grader")
        if "failed" in news:
            return Fault("sandbox", f"the sandbox failed: {news['why']}")
        status = news["status"]
        if status >= 0:
            return Fault(
                "exit", f"the code ended its own process (exit status {status}) instead of returning"
            )
        name = signal.Signals(-status).name
        hints = {
            "SIGKILL": "; it ran out of memory or processor time",
            "SIGSEGV": "; a recursion without an end can do that",
            "SIGXCPU": "; it ran out of processor time",
        }
        return Fault("signal", f"the code's process was ended by {name}{hints.get(name, '')}")

    def kill(self) -> None:
        """End it and all that it has started. May be called twice."""
        if not self.alive:
            return
        self.alive = False
        if self.out >= 0:
            try:
                while self.printed < self.limits.output:
                    part = os.read(self.out, 1 << 14)
                    if not part:
                        break
                    self.printed += len(part)
                    self._keep(part)
            except OSError:
                pass
            os.close(self.out)
            self.out = -1
        self.socket.close()
        self.sandbox.end(self.number)

    @property
    def text(self) -> str:
        """What it printed, as far as it is kept."""
        left_out = self.printed - len(self.output) - len(self.tail)
        cut = f"\n[... {left_out:,} bytes are left out ...]\n".encode() if left_out > 0 else b""
        return (bytes(self.output) + cut + self.tail).decode("utf-8", "replace")
