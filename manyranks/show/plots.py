"""Line plots whose lines say their own names: no legend to match colours against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import IdentityTransform

from manyranks.runtime.run import human_bytes, human_seconds

from .pen import check_words, text_width
from .style import COLORS, Picture, figure, picture

__all__ = ["UNITS", "lines", "loglog"]

#: How numbers on an axis are written, by the name that `xunit` and `yunit` take.
UNITS: dict[str, Callable[[float], str]] = {
    "bytes": human_bytes,
    "seconds": human_seconds,
    "bytes/s": lambda v: f"{human_bytes(v)}/s",
    "percent": lambda v: f"{v:.4g} %",
}

_MARKERS = "osD^vPX*"
_DASHES: list[Any] = [
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (3, 1)),
    (0, (8, 2)),
    (0, (1, 2)),
    "-",
]


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    title: str | None = None,
    *,
    xscale: str = "linear",
    yscale: str = "linear",
    xunit: str | None = None,
    yunit: str | None = None,
    xticks: Sequence[float] | None = None,
    points: Sequence[str] = (),
    alt: str | None = None,
    width: float = 520,
    height: float = 300,
    finish: Callable[[Axes], Any] | None = None,
) -> Picture:
    """Lines with their names at their ends; each has its own colour, marker and dashes.

    Parameters
    ----------
    series
        Name -> (xs, ys), in the order of the colours.
    xlabel, ylabel, title
        What stands at the axes (with the unit, unless `xunit` or `yunit` writes it at each number) and above.
    xscale, yscale
        "linear", "log" (powers of 10) or "log2".
    xunit, yunit
        "bytes", "seconds", "bytes/s" or "percent": numbers are written with the unit (1 kB, 25 µs).
    xticks
        Where the numbers stand on the x axis, e.g. ``[1, 2, 4, 8]``.
    points
        Names of series that are points without a line: measurements among predictions.
    alt
        Alternative text; the default names the axes and gives each line's first and last value.
    finish
        Called with the matplotlib axes before it is drawn, for what these parameters don't say.

    Raises
    ------
    TypeError, ValueError
        Naming the argument: no series, lengths that differ, a number that a log axis has no place for.

    Examples
    --------
    >>> lines({"ring": ([2, 4, 8], [1.0, 1.5, 1.75])}, "ranks", "bytes sent / message", xscale="log2")
    Picture('bytes sent / message against ranks. ring: from 1 at 2 to 1.75 at 8.')
    """
    data = _check_series(series, xscale, yscale)
    check_words(xlabel=xlabel, ylabel=ylabel, title=title, alt=alt)
    for argument, unit in (("xunit", xunit), ("yunit", yunit)):
        if unit is not None and unit not in UNITS:
            raise ValueError(f"{argument} must be one of {', '.join(map(repr, UNITS))} or None, got {unit!r}")
    for point in points:
        if point not in data:
            raise ValueError(
                f"points must be names of series, got {point!r}; the series are {', '.join(data)}"
            )
    write_x, write_y = UNITS.get(xunit or "", _plain), UNITS.get(yunit or "", _plain)
    room = min(0.4 * width, max(text_width(name, 12) for name in data) * 0.95 + 28)
    fig = figure(width, height, left=76 if yunit else 60, right=room, top=30 if title else 14)
    ax = fig.add_subplot()
    for place, (name, (x, y)) in enumerate(data.items()):
        ax.plot(
            x,
            y,
            color=list(COLORS.values())[place % len(COLORS)],
            marker=_MARKERS[place % 8],
            linestyle="none" if name in points else _DASHES[place % 8],
            markevery=max(1, len(x) // 12),
            markersize=7 if name in points else 5,
        )
    for axis, scale, write in ((ax.xaxis, xscale, write_x), (ax.yaxis, yscale, write_y)):
        _scale(ax, axis, scale, write)
    if xticks is not None:
        ax.set_xticks(list(xticks))
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(True, which="major")
    if title:
        ax.set_title(title)
    if finish is not None:
        finish(ax)
    _name_ends(ax, data, height)
    return picture(fig, alt or _say(data, xlabel, ylabel, title, write_x, write_y))


def loglog(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    title: str | None = None,
    **options: Any,
) -> Picture:
    """`lines` on two log axes: `loglog({"ring": (sizes, times)}, "message", "time", xunit="bytes", yunit="seconds")`."""
    return lines(series, xlabel, ylabel, title, **{"xscale": "log", "yscale": "log", **options})


def _check_series(series: Any, xscale: str, yscale: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    if not isinstance(series, Mapping):
        raise TypeError(f"series must be a dict from a name to (xs, ys), got {type(series).__name__}")
    if not series:
        raise ValueError("series must have at least one line, got none")
    if len(series) > 8:
        raise ValueError(f"series must have at most 8 lines, got {len(series)}: more can't be told apart")
    for argument, scale in (("xscale", xscale), ("yscale", yscale)):
        if scale not in ("linear", "log", "log2"):
            raise ValueError(f"{argument} must be 'linear', 'log' or 'log2', got {scale!r}")
    data = {}
    for name, pair in series.items():
        where = f"series[{name!r}]"
        if not isinstance(name, str) or not name.strip():
            raise TypeError(f"series must have names that are words, got {name!r}")
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"{where} must be (xs, ys), got {pair!r:.60}")
        x, y = (np.asarray(list(v), dtype=float) for v in pair)
        if len(x) != len(y) or len(x) == 0:
            raise ValueError(
                f"{where} must have as many ys as xs and at least one, got {len(x)} xs and {len(y)} ys"
            )
        for which, values, scale in (("xs", x, xscale), ("ys", y, yscale)):
            if not np.isfinite(values).all():
                raise ValueError(f"{where} must have finite {which}, got {values[~np.isfinite(values)][0]}")
            if scale != "linear" and (values <= 0).any():
                raise ValueError(f"{where} must have positive {which} on a log axis, got {values.min():g}")
        data[name] = (x, y)
    return data


def _scale(ax: Axes, axis: Any, scale: str, write: Callable[[float], str]) -> None:
    set_scale = ax.set_xscale if axis is ax.xaxis else ax.set_yscale
    if scale == "linear":
        axis.set_major_formatter(FuncFormatter(lambda v, _: write(v)))
        return
    base = 2 if scale == "log2" else 10
    set_scale("log", base=base)
    axis.set_major_locator(LogLocator(base=base, numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda v, _: write(v)))
    axis.set_minor_locator(NullLocator())
    low, high = ax.get_xlim() if axis is ax.xaxis else ax.get_ylim()
    if math.log(high / low, base) < 1.2:  # too short for two powers: let it count 1, 2, 5
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=7))


def _plain(v: float) -> str:
    return (
        f"{v:.4g}" if abs(v) < 1e4 else f"{v:.3e}".replace("e+0", "e").replace("e+", "e").replace(".000", "")
    )


def _name_ends(ax: Axes, data: dict, height: float) -> None:
    """Each line's name beside its last point, moved apart where they would overlap."""
    ax.set_xlim(ax.get_xlim())
    ax.set_ylim(ax.get_ylim())
    bottom, top = (ax.transAxes.transform((0, v))[1] for v in (0, 1))
    ends = []
    for place, (name, (x, y)) in enumerate(data.items()):
        last = int(np.argmax(x))
        ends.append([ax.transData.transform((x[last], y[last]))[1], place, name, x[last], y[last]])
    ends.sort(key=lambda e: (e[0], e[1]))
    at: list[float] = []
    for wanted, *_ in ends:
        at.append(max(wanted, bottom + 6, at[-1] + 15 if at else -math.inf))
    over = at[-1] - top if at else 0
    if over > 0:  # too high: push down from the top again
        at[-1] = top
        for k in range(len(at) - 2, -1, -1):
            at[k] = min(at[k], at[k + 1] - 15)
    edge = ax.transAxes.transform((1, 0))[0]
    for y_pixel, (_, place, name, x, y) in zip(at, ends):
        color = list(COLORS.values())[place % len(COLORS)]
        px, py = ax.transData.transform((x, y))
        # The name in ink, which every page's contrast suits, and the line's own marker before it.
        pixels = {"transform": IdentityTransform(), "clip_on": False}
        ax.plot([px, edge + 10], [py, y_pixel], color=color, linewidth=0.7, **pixels)
        ax.plot([edge + 12], [y_pixel], color=color, marker=_MARKERS[place % 8], markersize=6, **pixels)
        ax.text(edge + 19, y_pixel, name, va="center", fontsize=12, **pixels)


def _say(
    data: dict, xlabel: str, ylabel: str, title: str | None, write_x: Callable, write_y: Callable
) -> str:
    said = f"{title}: {ylabel} against {xlabel}." if title else f"{ylabel} against {xlabel}."
    for name, (x, y) in data.items():
        first, last = int(np.argmin(x)), int(np.argmax(x))
        if first == last or len(x) == 1:
            said += f" {name}: {write_y(y[0])} at {write_x(x[0])}."
        else:
            said += f" {name}: from {write_y(y[first])} at {write_x(x[first])} to {write_y(y[last])} at {write_x(x[last])}."
    return said
