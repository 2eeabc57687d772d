"""The module that a lab's tests see in the submission's place.

``lab.f(x)`` asks a sandboxed child for f of x and returns plain data. A test's function among the arguments is called
back here, in the test's process. A call whose arguments hold a `Comm` is a rank's program: it gets a child of its own,
and every communication call comes back here, to the simulator that counts it.

Each test has fresh children; a rank keeps its child for the length of a test.
"""

from __future__ import annotations

import builtins
import secrets
import types
from collections.abc import Callable
from typing import Any

from manyranks.grading import wire
from manyranks.grading.sandbox import Child, Fault, Sandbox, SandboxUnavailable
from manyranks.runtime.comm import Comm, Work

__all__ = ["LabModule", "Session"]

#: What a rank program may ask of its communicator.
COMM_CALLS = frozenset(
    "send recv isend irecv broadcast reduce all_reduce reduce_scatter all_gather gather scatter all_to_all barrier "
    "group compute time record".split()
)
#: The exceptions that travel, by name. StopIteration doesn't: raised in a test's loop it would end the loop early.
EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (StopIteration, StopAsyncIteration, Warning, UnicodeError, AssertionError))
    and name not in ("ExceptionGroup", "BaseExceptionGroup")
}
MAX_REQUESTS = 200_000  # of one call, to functions of the test


class Session:
    """What the tests of one submission share: its sandbox, and what happened in the test that runs."""

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox
        self.idle: dict[Any, list[Child]] = {}  # by rank; None for plain calls
        self.fault: Fault | None = None
        self.output: list[str] = []
        self.broken = ""  # the sandbox itself failed: nobody's fault but ours

    def begin_test(self) -> None:
        self.end_test()
        self.fault, self.output = None, []

    def end_test(self) -> None:
        for children in self.idle.values():
            for child in children:
                self._drop(child)
        self.idle.clear()

    def _drop(self, child: Child) -> None:
        child.kill()
        if child.text:
            self.output.append(child.text)

    def ask(self, op: str, name: str, args: tuple = (), kwargs: dict | None = None) -> Any:
        """One call in a child; what it answers, or the exception that it raised."""
        talk, number = _Talk(), secrets.randbits(62)
        message = ("call", number, name, args, kwargs or {}) if op == "call" else (op, number, name)
        body = wire.encode(message, talk.handle)  # finds the communicator too, and so the rank
        waiting = self.idle.setdefault(talk.rank, [])
        try:
            child = waiting.pop() if waiting else self.sandbox.spawn()
        except SandboxUnavailable as error:
            self.broken = str(error)
            raise
        except Fault as fault:
            self.fault = self.fault or fault
            raise
        done = False
        child.waited = 0.0
        try:
            value = self._converse(child, talk, number, body)
            done = True
            return value
        except _Raised as raised:
            done = True
            raise raised.error from None
        except Fault as fault:
            self.fault = self.fault or fault
            if fault.kind == "sandbox":  # before any code of the submission ran
                self.broken = str(fault)
            raise
        finally:
            if done:
                self.idle.setdefault(talk.rank, []).append(child)
            else:
                self._drop(child)

    def _converse(self, child: Child, talk: _Talk, number: int, body: bytes) -> Any:
        child.send(body)
        for _ in range(MAX_REQUESTS):
            try:
                message = wire.decode(child.receive())
            except wire.WireError as error:
                raise child.fault("protocol", f"what came back is no plain data: {error}") from None
            if (
                type(message) is not tuple
                or len(message) < 3
                or type(message[1]) is not int
                or message[1] != number
            ):
                raise child.fault("protocol", "the code answered something that wasn't asked")
            kind, _, *rest = message
            if type(kind) is not str:
                raise child.fault("protocol", "the code sent a message that isn't one")
            if kind == "value" and len(rest) == 1:
                return rest[0]
            if kind == "error" and len(rest) == 3 and all(type(r) is str for r in rest):
                raise _Raised(*rest)
            if kind == "ask" and len(rest) == 4:
                child.send(self._serve(talk, number, *rest))
                continue
            raise child.fault("protocol", "the code sent a message that isn't one")
        raise child.fault("requests", f"the code made more than {MAX_REQUESTS:,} calls back in one call")

    def _serve(self, talk: _Talk, number: int, handle: Any, method: Any, args: Any, kwargs: Any) -> bytes:
        """Call what the child may call: a test's function, a communicator, something that it waits for."""
        try:
            target = talk.given.get(handle) if type(handle) is int else None
            if type(args) is not tuple or type(kwargs) is not dict or not all(type(k) is str for k in kwargs):
                raise TypeError("arguments that are none")
            if isinstance(target, Comm):
                if type(method) is not str or method not in COMM_CALLS:
                    raise AttributeError(f"a communicator has no call {method!r}")
                value = getattr(target, method)(*args, **kwargs)
            elif isinstance(target, Work):
                value = target.wait()
            elif target is not None:
                value = target(*args, **kwargs)
            else:
                raise LookupError("no such function")
            return wire.encode(("reply", number, value), talk.handle)
        except (
            AssertionError
        ):  # a test's own assertion, in a function that it handed over: not for the child to swallow
            raise
        except Exception as error:
            kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in EXCEPTIONS), "RuntimeError")
            message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
            return wire.encode(("raise", number, kind, message[:4000]))


class _Raised(Exception):
    """The submission's code raised; `error` is for the test."""

    def __init__(self, name: str, message: str, where: str):
        message = message[:4000]
        if name in ("StopIteration", "StopAsyncIteration"):
            self.error: Exception = RuntimeError(f"{name}: {message}")
        elif name == "AssertionError":
            self.error = _SubmissionAssertion(message)
        else:
            kind = EXCEPTIONS.get(name)
            self.error = kind(message) if kind else RuntimeError(f"{name}: {message}")
        self.error.__manyranks_where__ = where[:2000]


class _SubmissionAssertion(AssertionError):
    """An assert in the submission failed, not one of the test."""


class _Talk:
    """What one call has handed to a child: numbers for things that stay here."""

    def __init__(self) -> None:
        self.given: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.rank: int | None = None

    def _number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = number = secrets.randbits(60)
            self.given[number] = value  # kept, so that its id stays its own
        return self.numbers[id(value)]

    def handle(self, value: Any) -> tuple[str, Any] | None:
        if isinstance(value, Comm):
            if self.rank is None:
                self.rank = value.rank
            return "comm", (self._number(value), value.rank, value.size, tuple(value.ranks))
        if isinstance(value, Work):
            return "work", self._number(value)
        if isinstance(value, LabFunction):
            return "own", value.__name__
        if isinstance(value, Callable) and not isinstance(value, type):
            return "callback", (self._number(value), getattr(value, "__name__", "function"))
        return None


class LabFunction:
    """A function of the submission."""

    def __init__(self, session: Session, name: str):
        self._session = session
        self.__name__ = self.__qualname__ = name
        self.__module__ = "lab"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._session.ask("call", self.__name__, args, kwargs)

    def __repr__(self) -> str:
        return f"<function {self.__name__} of the submission>"


class LabModule(types.ModuleType):
    """Stands in `sys.modules` where the tests look for the lab."""

    def __init__(self, name: str, session: Session):
        super().__init__(name, "A submission, behind the sandbox's wall.")
        self.__dict__["_session"] = session
        self.__dict__["_functions"] = {}

    def __getattr__(self, name: str) -> Any:
        __tracebackhide__ = True
        if name.startswith("_"):  # pytest asks every object for some
            raise AttributeError(name)
        if name in self._functions:
            return self._functions[name]
        answer = self._session.ask("get", name)
        if type(answer) is not tuple or len(answer) != 2:
            answer = ("missing", None)
        kind, value = answer
        if kind == "function":
            function = self._functions[name] = LabFunction(self._session, name)
            return function
        if kind == "value":
            return value
        raise AttributeError(
            f"lab.py has no function or constant {name!r}. Is its name spelled as in the lab's text?"
        )
