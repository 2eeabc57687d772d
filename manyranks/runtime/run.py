"""`Run`: what is left when a rank program has run, in either world."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Interval", "Message", "Record", "Run", "Timeline", "Traffic"]


class Message(NamedTuple):
    """One message. Times in seconds since the run began: when its first byte left and when its last one arrived.

    ``round`` is 1 + the number of messages that had to arrive, one after the other, before this one was sent.
    ``call`` is what sent it ("send", or the collective's name); ``tier`` the network that it took (0 within a node,
    1 between nodes); ``count`` is above 1 where a closed form, the vectorised path or a real backend's collective
    stands for that many messages.
    """

    source: int
    destination: int
    bytes: int
    start: float
    end: float
    round: int
    call: str = "send"
    tier: int = 0
    count: int = 1


class Interval(NamedTuple):
    """What a rank did from `start` to `end`: "compute", or "wait" for communication that had not ended yet.

    ``lane`` is 0 for the program itself. Lanes 1 and up hold the collectives started with ``async_op=True``, one lane
    for each group, with kind "comm": under way, and nobody need be waiting.
    """

    rank: int
    lane: int
    kind: str
    label: str
    start: float
    end: float


class Record(NamedTuple):
    """What a rank put down with ``comm.record(label, x)``, and when."""

    rank: int
    time: float
    label: str
    value: Any


class _Rows(Sequence):
    """A sequence of named tuples, made from plain ones when somebody looks: a long run has millions."""

    kind: type
    order: Any = None

    def __init__(self, rows: Iterable[tuple]):
        self._rows = rows if isinstance(rows, list) else list(rows)
        self._sorted = False

    def _in_order(self) -> list[tuple]:
        if not self._sorted:
            self._rows.sort(key=self.order)
            self._sorted = True
        return self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        rows = self._in_order()
        return [self.kind._make(r) for r in rows[i]] if isinstance(i, slice) else self.kind._make(rows[i])

    def __iter__(self) -> Iterator[Any]:
        return map(self.kind._make, self._in_order())


class Timeline(_Rows):
    """The `Interval`s of a run, ordered by rank, lane and start."""

    kind = Interval
    order = operator.itemgetter(0, 1, 4, 5)

    def __repr__(self) -> str:
        return f"Timeline({len(self)} intervals)"


class Traffic(_Rows):
    """The `Message`s of a run, in the order of their start (then source, destination and end)."""

    kind = Message
    order = operator.itemgetter(3, 0, 1, 4)

    def __init__(self, messages: Iterable[tuple], ranks: int):
        super().__init__(messages)
        self.ranks = ranks

    def __repr__(self) -> str:
        return f"Traffic({self.count} messages, {self.bytes} bytes)"

    def where(self, **fields: Any) -> Traffic:
        """The messages whose fields have these values, e.g. ``traffic.where(destination=0, tier=1)``."""
        unknown = set(fields) - set(Message._fields)
        if unknown:
            raise ValueError(f"a message has the fields {', '.join(Message._fields)}, got {', '.join(sorted(unknown))}")
        return Traffic([m for m in self if all(getattr(m, k) == v for k, v in fields.items())], self.ranks)

    @property
    def bytes(self) -> int:
        """All bytes, each counted once."""
        return sum(r[2] for r in self._rows)

    @property
    def count(self) -> int:
        """How many messages; more than ``len`` where some stand for many."""
        return sum(r[8] for r in self._rows)

    def sent(self) -> np.ndarray:
        """Bytes that each rank sent; int64, shape (ranks,)."""
        return self._sum("source")

    def received(self) -> np.ndarray:
        """Bytes that each rank received; int64, shape (ranks,)."""
        return self._sum("destination")

    def _sum(self, end: str) -> np.ndarray:
        out = [0] * self.ranks
        at = Message._fields.index(end)
        for row in self._rows:
            out[row[at]] += row[2]
        return np.array(out, dtype=np.int64)

    def matrix(self) -> np.ndarray:
        """Bytes from each rank (row) to each rank (column); int64, shape (ranks, ranks)."""
        out = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        for row in self._rows:
            out[row[0], row[1]] += row[2]
        return out


@dataclass
class Run:
    """What a rank program left behind.

    Attributes:
        results: what each rank's program returned, in rank order.
        seconds: when the last rank ended: virtual time of a simulation, measured time under `launch`.
        traffic: every message. Under `launch` a backend's own collective can't be looked into: it stands there as what
            the ring would send, and ``nominal`` is true.
        timeline: intervals of computing and waiting, per rank.
        cluster: the simulated `Cluster`, or a dict that describes the real machine.
        world: "simulated", or what the ranks really ran on, e.g. "4 processes, gloo on CPU".
        ends: when each rank ended, in seconds.
        records: what the ranks kept with ``comm.record``.
        nominal: whether any traffic was set down by a formula, not seen message by message.
        notes: what a reader of the figures ought to know.
    """

    results: list[Any]
    seconds: float
    traffic: Traffic
    timeline: Timeline
    cluster: Any
    world: str
    ends: list[float]
    records: list[Record] = field(default_factory=list)
    nominal: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """How many ranks ran."""
        return len(self.results)

    @property
    def bytes_sent(self) -> np.ndarray:
        """Bytes that each rank sent; int64, shape (ranks,)."""
        return self.traffic.sent()

    @property
    def bytes_received(self) -> np.ndarray:
        """Bytes that each rank received; int64, shape (ranks,)."""
        return self.traffic.received()

    @property
    def rounds(self) -> int:
        """The longest chain of messages in which each had to wait for the one before: the steps of an algorithm."""
        return max((row[5] for row in self.traffic._rows), default=0)

    def busy(self, kind: str = "compute") -> np.ndarray:
        """Seconds that each rank's own lane spent on `kind` ("compute" or "wait"); shape (ranks,)."""
        if kind not in ("compute", "wait"):
            raise ValueError(f"kind must be 'compute' or 'wait', got {kind!r}")
        out = np.zeros(self.ranks)
        for i in self.timeline:
            if i.kind == kind and i.lane == 0:
                out[i.rank] += i.end - i.start
        return out

    def show(self, **options: Any) -> Any:
        """Draw the timeline: see `manyranks.show.timeline`."""
        from manyranks.show import timeline  # drawing needs matplotlib; running does not

        return timeline(self, **options)

    def __repr__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        sent = f"{self.traffic.count} messages, {human_bytes(self.traffic.bytes)}{' (nominal)' * self.nominal}"
        return f"<Run: {ranks}, {self.world}, {human_seconds(self.seconds)}, {sent}>"


def human_bytes(n: float) -> str:
    """Bytes in decimal units, as the book writes them.

    >>> human_bytes(14_000_000_000)
    '14 GB'
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        text = f"{n:.4g}"
        if abs(float(text)) < 1000 or unit == "TB":  # 999,950 B is 1 MB, not 1000 kB
            return f"{text} {unit}"
        n /= 1000
    raise AssertionError


def human_seconds(s: float) -> str:
    """Seconds in a readable unit.

    >>> human_seconds(2.5e-5)
    '25 µs'
    """
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        text = f"{s * scale:.4g}"
        if abs(float(text)) < limit * scale:  # 0.9999999 s is 1 s, not 1000 ms
            return f"{text} {unit}"
    return f"{s:.4g} s"
