"""What can go wrong in a run, and how each is told."""

from __future__ import annotations

__all__ = ["CollectiveMismatchError", "DeadlockError", "LaunchTimeout", "RankError", "UnreceivedMessageError"]


class RankError(RuntimeError):
    """A rank program raised, exited or died; the run has ended.

    Attributes:
        rank: the rank that failed first (in virtual time, or as the processes reported it).
        traceback_text: that rank's own traceback, as text; "" if it left none (a killed process).

    In a simulation the original exception is also the ``__cause__``. Real processes can only send text.
    """

    def __init__(self, rank: int, summary: str, traceback_text: str = ""):
        self.rank = rank
        self.summary = summary
        self.traceback_text = traceback_text
        tail = f"\n\n{traceback_text.rstrip()}" if traceback_text else ""
        super().__init__(f"rank {rank}: {summary}{tail}")

    def __reduce__(self):
        return type(self), (self.rank, self.summary, self.traceback_text)


class DeadlockError(RuntimeError):
    """Every rank that has not finished waits for another, and nothing is under way.

    Attributes:
        waiting: for each waiting rank, what it waits for, in words.
        cycle: ranks that wait for each other in a circle, first one repeated at the end; () if there is none
            (somebody then waits for a rank that has finished).
    """

    def __init__(self, message: str, waiting: dict[int, str], cycle: tuple[int, ...] = ()):
        self.waiting = waiting
        self.cycle = cycle
        super().__init__(message)


class CollectiveMismatchError(ValueError):
    """Two ranks of one group met in different collectives, or in one with arguments that don't go together."""


class UnreceivedMessageError(RuntimeError):
    """The program ended with a message that nobody received, or a receive that nothing answered."""


class LaunchTimeout(TimeoutError):
    """Real processes did not finish within ``timeout``; all of them have been ended.

    Attributes:
        last_calls: for each rank, its last communication call, in words.
    """

    def __init__(self, message: str, last_calls: dict[int, str]):
        self.last_calls = last_calls
        super().__init__(message)
