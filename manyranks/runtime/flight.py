"""The flight recorder: what each rank is doing, in shared memory, so that it can be told when the rank no longer can.

One small file for each rank, mapped by the rank and by the process that launched it. Writing to it costs a rank a
microsecond or two; reading it needs nothing from the rank, even if it hangs in C code or is dead.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

__all__ = ["CallLog", "FlightRecorder", "first_difference"]

_STATUS = struct.Struct("<QdIBxH")  # version (odd while it changes), since, pid, state, length of the text
_ENTRY = struct.Struct("<IIII")  # group, call number, text, ranks of the group
_TEXT, _TEXTS, _RING = 512, 1 << 16, 4096
_TEXT_AT = 64
_TABLE_AT = _TEXT_AT + _TEXT
_RING_AT = _TABLE_AT + 8 + _TEXTS
_SIZE = _RING_AT + 8 + _RING * _ENTRY.size

STARTING, RUNNING, IN_CALL, FINISHED = range(4)


class FlightRecorder:
    """What one rank is doing. The rank writes (`create=True`), the launching process reads.

    Times are `time.perf_counter` seconds, which all processes of one machine share.
    """

    def __init__(self, path: Path, create: bool = False):
        if create:
            with open(path, "wb") as file:
                file.truncate(_SIZE)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._version = 0
        self._pid = 0
        self._texts: dict[str, int] = {}
        self._used = 0
        self._entries = 0

    # ------------------------------------------------------------------ written by the rank

    def begin(self, state: int = STARTING, text: str = "") -> None:
        """Say which process this is, and what it does first."""
        self._pid = os.getpid()
        self.enter(text, time.perf_counter(), state)

    def enter(self, text: str, since: float, state: int = IN_CALL) -> None:
        """The rank is in a communication call now."""
        data = text.encode("utf-8", "replace")[:_TEXT]
        version = self._version = self._version + 2
        _STATUS.pack_into(self._map, 0, version - 1, since, self._pid, state, len(data))
        self._map[_TEXT_AT : _TEXT_AT + len(data)] = data
        struct.pack_into("<Q", self._map, 0, version)

    def leave(self) -> None:
        """The call has ended: the program computes. What it was stays there to be read."""
        self._map[20] = RUNNING

    def collective(self, group: int, number: int, text: str, size: int) -> int:
        """The rank is about to make this collective call. Returns the number that stands for `text` here."""
        known = self._texts.get(text)
        if known is None:
            known = self._texts[text] = len(self._texts)
            data = text.encode("utf-8", "replace")[:_TEXT] + b"\0"
            if self._used + len(data) <= _TEXTS:
                at = _TABLE_AT + 8 + self._used
                self._map[at : at + len(data)] = data
                self._used += len(data)
                struct.pack_into("<Q", self._map, _TABLE_AT, self._used)
        at = _RING_AT + 8 + self._entries % _RING * _ENTRY.size
        _ENTRY.pack_into(self._map, at, group, number % (1 << 32), known, size)
        self._entries += 1
        struct.pack_into("<Q", self._map, _RING_AT, self._entries)
        return known

    # ------------------------------------------------------------------ read by the launching process

    def read(self) -> tuple[int, int, float, str]:
        """(pid, state, since, text) of what the rank does; pid 0 if it has not begun."""
        for _ in range(100):
            version, since, pid, state, length = _STATUS.unpack_from(self._map, 0)
            text = self._map[_TEXT_AT : _TEXT_AT + length].decode("utf-8", "replace")
            if version % 2 == 0 and _STATUS.unpack_from(self._map, 0)[0] == version:
                break
        return pid, state, since, text

    def collectives(self) -> dict[tuple[int, int], str]:
        """The last calls: (group, call number) to what the rank called."""
        (used,) = struct.unpack_from("<Q", self._map, _TABLE_AT)
        table = bytes(self._map[_TABLE_AT + 8 : _TABLE_AT + 8 + used]).split(b"\0")[:-1]
        (entries,) = struct.unpack_from("<Q", self._map, _RING_AT)
        out = {}
        for i in range(max(0, entries - _RING + 64), entries):
            group, number, text, _ = _ENTRY.unpack_from(self._map, _RING_AT + 8 + i % _RING * _ENTRY.size)
            if text < len(table):
                out[group, number] = table[text].decode("utf-8", "replace")
        return out

    def close(self) -> None:
        self._map.close()


class CallLog:
    """All collective calls of one rank in one group, in order."""

    def __init__(self) -> None:
        from array import array

        self.texts: dict[str, int] = {}
        self.calls = array("I")

    def add(self, text: str) -> None:
        self.calls.append(self.texts.setdefault(text, len(self.texts)))


def first_difference(logs: dict[int, CallLog]) -> tuple[int, str, int, str] | None:
    """The first call in which ranks of a group differ: (rank, its call, other rank, its call); None if they agree."""
    ranks = sorted(logs)
    first = logs[ranks[0]]
    worst: tuple[int, tuple[int, str, int, str]] | None = None
    for other in ranks[1:]:
        mine, theirs = first, logs[other]
        if mine.calls == theirs.calls and list(mine.texts) == list(theirs.texts):
            continue
        a_texts, b_texts = list(mine.texts), list(theirs.texts)
        for at, (a, b) in enumerate(zip(mine.calls, theirs.calls)):
            if a_texts[a] != b_texts[b]:
                if worst is None or at < worst[0]:
                    worst = (at, (ranks[0], a_texts[a], other, b_texts[b]))
                break
    return worst[1] if worst else None
