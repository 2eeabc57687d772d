"""`chunk_grid`: who holds which chunk of a buffer, and which ranks' contributions are summed in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from manyranks.runtime.run import Run
from manyranks.runtime.schedules import chunk_bounds

from .pen import WIDTH, Pen, check_words, text_width
from .style import COLORS, ON_FILL, Picture
from .tables import as_array

__all__ = ["chunk_grid", "contributions"]

MOST_RANKS = 16
MOST_CHUNKS = 16
_MIXED, _STRANGE = -1, -2  # what a cell can be besides a set of ranks


def contributions(ranks: int, length: int) -> list[np.ndarray]:
    """Inputs whose sums tell what was summed: rank r's buffer holds 2**r, so bit r of a sum says "rank r is in it".

    >>> [x.tolist() for x in contributions(3, 2)]
    [[1, 1], [2, 2], [4, 4]]
    """
    for argument, value in (("ranks", ranks), ("length", length)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{argument} must be a whole number, got {value!r}")
        if value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    if ranks > 62:
        raise ValueError(f"ranks must be at most 62, the bits of an int64, got {ranks}")
    return [np.full(length, 1 << rank, dtype=np.int64) for rank in range(ranks)]


def chunk_grid(
    run: Run,
    step: int | None = None,
    label: str = "chunks",
    chunks: int | None = None,
    *,
    sends: str | None = "next",
    title: str | None = None,
    alt: str | None = None,
    name: str = "rank",
) -> Picture:
    """Who holds which chunk, and which ranks' contributions are in it.

    The program starts from `contributions` and records its buffer at the start and after every step; the run keeps it::

        def ring(comm, x):
            comm.record("chunks", x)
            for k in range(comm.size - 1):
                ...
                comm.record("chunks", x)

        run = simulate(ring, inputs=contributions(4, 8), record=True)
        chunk_grid(run, step=2)

    Rows are ranks, columns are chunks. Up to 4 ranks a cell says which ranks are summed in it ("0+1+3"), up to 8 how many,
    with a mark for each one along its foot; above, the part of it that is filled is the part of the ranks that is in it.
    A cell with all ranks in it is filled and has a tick. "?" is a value that no sum of the inputs gives, "mixed" a chunk
    whose elements differ.

    Parameters
    ----------
    run
        A `Run` with records: ``simulate(..., record=True)``.
    step
        The state after so many steps: of each rank the record with this index among those with `label`, or its last
        where it has fewer. The default is the end.
    label
        Which records: the first argument of ``comm.record``.
    chunks
        In how many chunks a buffer is cut (`chunk_bounds`); by default as many as there are ranks. Not used where the
        program recorded a list, which holds one array (or None) a chunk.
    sends
        "next" marks what each rank sends in the step that follows, "last" what it sent in the step before; None neither.
        Read from the run: the messages of that round, and the chunks they changed at the receiver.
    title, alt
        Words above the picture, and its alternative text. The default `alt` is made from the run.

    Raises
    ------
    TypeError, ValueError
        Naming the argument: no `Run`, no such record, a step beyond the last, phantom data.
    """
    states = _States(run, label, chunks)
    last = states.last
    if step is None:
        step = last
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step must be a whole number or None, got {step!r}")
    if not 0 <= step <= last:
        raise ValueError(
            f"step must be between 0 and {last}, the records of {label!r} a rank less one, got {step}"
        )
    if sends not in ("next", "last", None):
        raise ValueError(f"sends must be 'next', 'last' or None, got {sends!r}")
    check_words(title=title, alt=alt, name=name)
    at = [states.at(rank, step) for rank in range(run.ranks)]
    if len({len(row) for row in at}) > 1:
        raise ValueError(
            f"the records of {label!r} must have the same number of chunks, got {[len(row) for row in at]}"
        )
    moves: list[_Move] = []
    if sends == "next" and step < last:
        moves = _moves(run, states, step)
    elif sends == "last" and step > 0:
        moves = _moves(run, states, step - 1)
    depth = 0  # of arrows side by side in any step, so that cells stay where they are from frame to frame
    if sends is not None and run.ranks <= 8:
        depth = max(
            (1 + lane for k in range(last) for lane in _arrow_lanes(_moves(run, states, k)).values()),
            default=0,
        )
    return _draw_grid(run.ranks, at, moves, depth, step, last, sends, title, alt, name)


class _Move(NamedTuple):
    source: int
    destination: int
    chunk: int


class _States:
    """For each rank and step the chunks it holds, each as the set of ranks in it, as bits."""

    def __init__(self, run: Any, label: Any, chunks: Any):
        if not isinstance(run, Run):
            raise TypeError(f"run must be a Run, as simulate and launch return it, got {type(run).__name__}")
        if run.ranks > 62:
            raise ValueError(f"run must have at most 62 ranks, the bits of an int64, got {run.ranks}")
        if chunks is not None and (isinstance(chunks, bool) or not hasattr(chunks, "__index__")):
            raise TypeError(f"chunks must be a whole number or None, got {chunks!r}")
        if chunks is not None and chunks < 1:
            raise ValueError(f"chunks must be at least 1, got {chunks}")
        self._ranks, self._label, self._chunks = run.ranks, label, chunks or run.ranks
        self._values: list[list] = [[] for _ in range(run.ranks)]
        self._times: list[list[float]] = [[] for _ in range(run.ranks)]
        for record in run.records:
            if record.label == label:
                self._values[record.rank].append(record.value)
                self._times[record.rank].append(record.time)
        empty = [rank for rank, values in enumerate(self._values) if not values]
        if empty:
            known = ", ".join(sorted({repr(record.label) for record in run.records}))
            raise ValueError(
                f"label must be one that every rank recorded, got {label!r}, which rank {empty[0]} did not (recorded:"
                f" {known or 'nothing; call comm.record in the program and simulate it with record=True'})"
            )
        self.last = max(len(values) for values in self._values) - 1
        self._known: dict[tuple[int, int], list[int]] = {}

    def between(self, messages: Iterable[Any], step: int) -> list[Any]:
        """The messages that arrived between a rank's records `step` and `step` + 1."""
        found = []
        for m in messages:
            times = self._times[m.destination]
            if step + 1 < len(times) and times[step] < m.end <= times[step + 1]:
                found.append(m)
        return found

    def at(self, rank: int, step: int) -> list[int]:
        """The chunks of `rank` after `step` steps, or after its last."""
        step = min(step, len(self._values[rank]) - 1)
        if (rank, step) not in self._known:
            bits = _bits(self._values[rank][step], self._chunks, self._ranks, self._label)
            self._known[rank, step] = bits
        return self._known[rank, step]


def _bits(value: Any, chunks: int, ranks: int, label: str) -> list[int]:
    if isinstance(value, (list, tuple)):
        parts = [None if part is None else as_array(part, f"record {label!r}").ravel() for part in value]
    else:
        flat = as_array(value, f"record {label!r}").ravel()
        bounds = chunk_bounds(len(flat), chunks)
        parts = [flat[a:b] for a, b in zip(bounds, bounds[1:])]
    out = []
    for part in parts:
        if part is not None and part.dtype.kind not in "biuf":
            raise TypeError(
                f"record {label!r} must hold numbers that are sums of 2**rank, got dtype {part.dtype}"
            )
        if part is None or part.size == 0:
            out.append(0)
        elif not (part == part[0]).all():
            out.append(_MIXED)
        elif not 0 <= part[0] < 1 << ranks or part[0] != int(part[0]):  # not a number fails the first
            out.append(_STRANGE)
        else:
            out.append(int(part[0]))
    return out


def _moves(run: Run, states: _States, step: int) -> list[_Move]:
    """The messages of round `step` + 1, each with the chunks that it explains at its receiver."""
    found = _explained([m for m in run.traffic if m.round == step + 1], states, step)
    if (
        not found
    ):  # something else was sent before, and rounds and steps are not in line: go by the records' times
        found = _explained(states.between(run.traffic, step), states, step)
    return found


def _explained(messages: list, states: _States, step: int) -> list[_Move]:
    found = []
    for m in messages:
        here = states.at(m.source, step)
        before, after = states.at(m.destination, step), states.at(m.destination, step + 1)
        for chunk, (sent, was, now) in enumerate(zip(here, before, after)):
            if now != was and sent > 0 and now > 0 and now & sent == sent and now | was | sent == now:
                found.append(_Move(m.source, m.destination, chunk))
    return found


def _draw_grid(
    ranks: int,
    at: list,
    moves: list[_Move],
    depth: int,
    step: int,
    last: int,
    sends: str | None,
    title: str | None,
    alt: str | None,
    name: str,
) -> Picture:
    rows, columns = min(ranks, MOST_RANKS), min(len(at[0]), MOST_CHUNKS)
    moves = [m for m in moves if m.source < rows and m.destination < rows and m.chunk < columns]
    lanes = _arrow_lanes(moves)
    arrows = rows <= 8 and depth <= 4
    gutter = (16 + 5 * max(0, depth - 1) if arrows else 16) if rows <= 8 else 6
    height = 30 if rows <= 8 else 22
    left = 14 + text_width(f"{name} {rows - 1}", 13)
    wide = int((WIDTH - left - 4) / columns - gutter)
    top = 24 if title else 6
    pen = Pen()
    if title:
        pen.texts([(4, 12, title)], 13, bold=True)
    full = (1 << ranks) - 1
    pen.texts(
        [
            (left + c * (wide + gutter) + wide / 2, top + 8, f"chunk {c}" if wide > 52 else str(c))
            for c in range(columns)
        ],
        12,
        "middle",
    )
    top += 20

    def box(r: int, c: int) -> tuple[float, float, float, float]:
        return left + c * (wide + gutter), top + r * (height + 5), wide, height

    done, open_, marks, ticks, words, strong = [], [], [], [], [], []
    for r in range(rows):
        for c in range(columns):
            x, y, w, h = box(r, c)
            held = at[r][c]
            if held == full:
                done.append((x, y, w, h))
                wordy = rows <= 8 and w > 40
                tick = 5.0 if wordy else min(6.0, w / 4, h / 4)
                cx, cy = (x + w - 10, y + h / 2) if wordy else (x + w / 2, y + h / 2)
                ticks.append(
                    [(cx - tick, cy), (cx - tick / 4, cy + tick * 0.75), (cx + tick, cy - tick * 0.8)]
                )
                if wordy:
                    strong.append(
                        (
                            x + (w - 15) / 2,
                            y + h / 2,
                            "+".join(map(str, range(ranks))) if ranks <= 4 else f"{ranks}/{ranks}",
                        )
                    )
                continue
            open_.append((x, y, w, h))
            if held < 0:
                words.append((x + w / 2, y + h / 2, "?" if held == _STRANGE else "mixed" if w > 40 else "~"))
            elif rows > 8:
                part = held.bit_count() / ranks * (h - 2)
                marks.append((x + 1, y + h - 1 - part, w - 2, part))
            else:
                inside = [k for k in range(ranks) if held >> k & 1]
                text = (
                    ("+".join(map(str, inside)) if ranks <= 4 else f"{len(inside)}/{ranks}")
                    if inside
                    else "–"
                )
                words.append((x + w / 2, y + h / 2 - 2.5, text))
                unit = (w - 4) / ranks
                for a, b in _stretches(inside):
                    marks.append((x + 2 + a * unit, y + h - 6, (b - a) * unit, 4))
    if rows <= 8:
        pen.boxes(marks, COLORS["blue"], "mr-part")
        pen.boxes(done, COLORS["green"], "mr-done")
        pen.boxes(open_, "", "mr-open", 0.6, 0.8)
    else:  # many cells: fat lines for fills, and dashed lines along rows and columns for all the outlines
        pen.lines(
            [[(x + w / 2, y + h), (x + w / 2, y)] for x, y, w, h in marks],
            wide - 2,
            "mr-part",
            color=COLORS["blue"],
        )
        pen.lines(
            [[(x + w / 2, y), (x + w / 2, y + h)] for x, y, w, h in done],
            wide,
            "mr-done",
            color=COLORS["green"],
        )
        over, down = columns * (wide + gutter) - gutter, rows * (height + 5) - 5
        edges = [top + r * (height + 5) + side for r in range(rows) for side in (0, height)]
        pen.lines([[(left, y), (left + over, y)] for y in edges], 0.8, "mr-open", 0.6, f"{wide} {gutter}")
        edges = [left + c * (wide + gutter) + side for c in range(columns) for side in (0, wide)]
        pen.lines([[(x, top), (x, top + down)] for x in edges], 0.8, "", 0.6, f"{height} 5")
    pen.texts(words, 12 if wide > 26 else 10, "middle")
    pen.texts(strong, 11, "middle", fill=ON_FILL)
    pen.lines(ticks, 2, "mr-tick", color=ON_FILL)
    pen.texts(
        [(left - 8, top + r * (height + 5) + height / 2, f"{name} {r}") for r in range(rows)], 13, "end"
    )
    sources = sorted({(m.source, m.chunk) for m in moves})
    pen.boxes(
        [(x + 1, y + 1, w - 2, h - 2) for x, y, w, h in (box(r, c) for r, c in sources)],
        "",
        "mr-sends",
        1,
        2.4,
        stroke_color=COLORS["red"],
    )
    if arrows:
        paths = []
        for move, lane in lanes.items():
            x, y, w, h = box(move.source, move.chunk)
            to = box(move.destination, move.chunk)
            down = 5 if move.destination > move.source else -5
            out = x + w + 8 + 5 * lane
            paths.append(
                [
                    (x + w, y + h / 2 + down),
                    (out, y + h / 2 + down),
                    (out, to[1] + h / 2 - down),
                    (to[0] + w + 0.5, to[1] + h / 2 - down),
                ]
            )
        pen.arrows(paths, 1.4, 6, "mr-message", color=COLORS["red"])

    below = top + rows * (height + 5) + 10
    below = _grid_legend(pen, below, ranks, rows, bool(done), bool(sources), sends, arrows)
    notes = []
    if rows < ranks or columns < len(at[0]):
        notes.append(f"{rows} of {ranks} {name}s and {columns} of {len(at[0])} chunks drawn.")
    if notes:
        below = pen.paragraph(8, below, " ".join(notes), 11)
    return pen.done(round(below) + 2, alt or _say_grid(ranks, at, moves, step, last, sends, full))


def _stretches(members: list[int]) -> list[tuple[int, int]]:
    """[0, 1, 3] as [(0, 2), (3, 4)]."""
    out: list[tuple[int, int]] = []
    for k in members:
        if out and out[-1][1] == k:
            out[-1] = (out[-1][0], k + 1)
        else:
            out.append((k, k + 1))
    return out


def _arrow_lanes(moves: list[_Move]) -> dict[_Move, int]:
    """Side by side where two arrows of one column would lie on each other."""
    taken: dict[int, list[list[tuple[int, int]]]] = {}
    out = {}
    for move in sorted(set(moves), key=lambda m: (m.chunk, abs(m.source - m.destination), m)):
        low, high = sorted((move.source, move.destination))
        rows = taken.setdefault(move.chunk, [])
        lane = next((k for k, row in enumerate(rows) if all(high < a or b < low for a, b in row)), len(rows))
        if lane == len(rows):
            rows.append([])
        rows[lane].append((low, high))
        out[move] = lane
    return out


def _grid_legend(
    pen: Pen, y: float, ranks: int, rows: int, done: bool, sending: bool, sends: str | None, arrows: bool
) -> float:
    entries = []
    if rows > 8:
        entries.append(("part", "filled as far as it is summed"))
    elif ranks <= 4:
        entries.append(("part", "whose contributions are in it"))
    else:
        entries.append(("part", f"how many of {ranks}, and which"))
    entries.append(("done", "all are in it"))
    if sends is not None:
        entries.append(("sends", "sent next" if sends == "next" else "just sent"))
    x = 8.0
    for kind, text in entries:
        need = 26 + text_width(text, 12) * 0.95 + 12
        if x > 8 and x + need > pen.width:
            x, y = 8.0, y + 18
        if kind == "part":
            pen.boxes([(x, y - 7, 20, 14)], "", "", 0.6, 0.8)
            pen.boxes([(x + 1, y, 18, 6)] if rows > 8 else [(x + 2, y + 2, 9, 4)], COLORS["blue"])
        elif kind == "done":
            pen.boxes([(x, y - 7, 20, 14)], COLORS["green"])
            pen.lines([[(x + 5, y), (x + 8.5, y + 3.5), (x + 15, y - 4)]], 2, color=ON_FILL)
        else:
            pen.boxes([(x + 1, y - 6, 18, 12)], "", "", 1, 2.4, stroke_color=COLORS["red"])
        pen.texts([(x + 25, y, text)], 12)
        x += need
    return y + 16


def _say_grid(ranks: int, at: list, moves: list, step: int, last: int, sends: str | None, full: int) -> str:
    done = [sum(held == full for held in row) for row in at]
    chunks = len(at[0])
    said = f"{ranks} rank{'s' * (ranks != 1)} and {chunks} chunk{'s' * (chunks != 1)} after step {step} of {last}: "
    if min(done) == chunks:
        said += "every rank holds every chunk complete."
    elif min(done) == max(done):
        said += f"each rank holds {done[0] or 'no'} complete chunk{'s' * (done[0] != 1)}."
    else:
        said += f"the ranks hold {min(done)} to {max(done)} complete chunks."
    if moves and ranks <= 4:
        when = "Next" if sends == "next" else "Just sent"
        said += (
            f" {when}: "
            + ", ".join(f"rank {m.source} sends chunk {m.chunk} to rank {m.destination}" for m in moves)
            + "."
        )
    return said
