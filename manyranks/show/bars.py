"""Horizontal bars with their names before and their numbers behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .pen import WIDTH, Pen, check_words, nice_ticks, text_width
from .plots import UNITS
from .style import COLORS, Picture

__all__ = ["bars"]

_ROW, _BAR = 28, 18


def bars(
    values: Mapping[str, float],
    title: str | None = None,
    *,
    unit: str | None = None,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    mark: str | None = None,
    note: str = "fastest",
    alt: str | None = None,
    width: float = WIDTH,
) -> Picture:
    """One bar for each of `values`.

    Parameters
    ----------
    values
        Name -> number; numbers are finite, and positive on a log axis.
    title
        Words above the bars.
    unit
        How numbers are written: a name of `manyranks.show.plots.UNITS` ("seconds", "bytes", "bytes/s", "percent").
    log, limits
        A log axis, and where the axis begins and ends. Give limits in an explorer, so that frames can be compared.
    mark, note
        The name of a bar to set off, and the word that says why.
    alt
        Alternative text; the default reads the numbers out.

    Examples
    --------
    >>> bars({"ring": 2e-3, "tree": 1e-3}, unit="seconds", mark="tree")
    Picture('ring: 2 ms, tree: 1 ms (fastest).')
    """
    if not isinstance(values, Mapping) or not values:
        raise ValueError(f"values must be a dict from a name to a number, with at least one, got {values!r}")
    check_words(title=title, alt=alt)
    numbers = {name: float(v) for name, v in values.items()}
    for name, v in numbers.items():
        if not math.isfinite(v) or (log and v <= 0) or v < 0:
            raise ValueError(f"values[{name!r}] must be a finite {'positive ' * log}number, got {v}")
    if unit is not None and unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(map(repr, UNITS))} or None, got {unit!r}")
    if mark is not None and mark not in numbers:
        raise ValueError(f"mark must be one of {', '.join(map(repr, numbers))}, got {mark!r}")
    write = UNITS[unit] if unit else lambda v: f"{v:.4g}"
    low, high = limits or ((min(numbers.values()) / 3 if log else 0.0), max(numbers.values()))
    if not low < high:
        low, high = (high / 3 if log else 0.0), high or 1.0

    left = max(text_width(name, 13) for name in numbers) * 0.95 + 10
    words = {name: write(v) + (f", {note}" if name == mark else "") for name, v in numbers.items()}
    right = max(text_width(w, 13) for w in words.values()) * 0.9 + 8
    room = max(width - left - right, 80.0)

    def at(v: float) -> float:
        v = min(max(v, low), high)
        part = (math.log(v) - math.log(low)) / (math.log(high) - math.log(low)) if log else (v - low) / (high - low)
        return part * room

    pen = Pen(width)
    top = 30.0 if title else 6.0
    if title:
        pen.texts([(0, 14, title)], 14, bold=True)
    foot = top + _ROW * len(numbers)
    ticks = _powers(low, high) if log else nice_ticks(low, high, 5)
    pen.lines([[(left + at(t), top), (left + at(t), foot)] for t in ticks], 1, opacity=0.25)
    pen.texts([(left + at(t), foot + 12, write(t)) for t in ticks], 11, anchor="middle")
    rows = {name: top + _ROW * i + (_ROW - _BAR) / 2 for i, name in enumerate(numbers)}
    pen.boxes([(left, y, max(at(numbers[k]), 1), _BAR) for k, y in rows.items() if k != mark], COLORS["blue"])
    if mark is not None:
        box = (left, rows[mark], max(at(numbers[mark]), 1), _BAR)
        pen.boxes([box], COLORS["orange"])
        pen.texture([box], 1)
    pen.texts([(left - 6, y + _BAR / 2, name) for name, y in rows.items()], 13, anchor="end")
    pen.texts([(left + at(numbers[k]) + 5, y + _BAR / 2, words[k]) for k, y in rows.items()], 13)
    said = ", ".join(f"{k}: {write(v)}{f' ({note})' if k == mark else ''}" for k, v in numbers.items())
    return pen.done(foot + 24, alt or f"{title + ': ' if title else ''}{said}.")


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten from `low` to `high`: every one, or every second or third where there are many."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / 5))
    return [10.0**e for e in range(first, last + 1, stride)]
