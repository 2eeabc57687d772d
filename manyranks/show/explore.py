"""`explore`: pictures under sliders that stay alive when no kernel runs.

`explore(frame, ranks=(2, 4, 8), step=range(15))` calls `frame(ranks=..., step=...)` for every combination,
keeps the pictures, and shows one of them under a row of sliders. Choosing a picture is done by the browser:
each slider's `index` is joined by `jslink` to the `selected_index` of nested `Stack`s. So the same widget works
in JupyterLab, in VS Code and in a published page that has no kernel behind it.

What an axis may be
    a tuple or list     values you choose from                     `ranks=(2, 4, 8)`
    a dict              label -> value                             `size={"1 kB": 1e3, "1 MB": 1e6}`
    a range             a stepping axis: gets a Play button too    `step=range(15)`
    a function          of earlier axes, by name, that returns one of the above: a ragged grid
                        `step=lambda ranks: range(2 * (ranks - 1) + 1)`

With a function, every value of the earlier axis has its own slider with its own length, and only the one that
applies is shown. A frame may also be None where a combination makes no sense; a short note stands there.

What a frame may be
    a matplotlib Figure, a `Picture`, a string that holds an `<svg>`, any object with `_repr_mimebundle_`,
    `_repr_svg_` or `_repr_html_`, or a plain string, which is shown as preformatted text.
    Frames that come out equal are stored once.
"""

from __future__ import annotations

import base64
import html
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from .style import Picture, to_svg, with_alt

__all__ = ["Explorer", "explore"]

_NOTHING = '<p class="mr-nothing">There is nothing to show for this choice.</p>'


def explore(
    frame: Callable[..., Any],
    *,
    labels: Mapping[str, str] | None = None,
    formats: Mapping[str, Callable[[Any], str]] | None = None,
    alt: str | Callable[..., str] | None = None,
    start: Mapping[str, Any] | None = None,
    interval: int = 700,
    max_frames: int = 400,
    max_bytes: int = 4_000_000,
    **axes: Any,
) -> Explorer:
    """Compute `frame` over a grid and show it under sliders that need no kernel.

    Parameters
    ----------
    frame
        Called with one keyword argument per axis; returns a picture (see the module's docstring) or None.
    labels
        What stands before a slider, per axis: `{"ranks": "GPUs"}`. The default is the axis's own name.
    formats
        How a value is written, per axis: `{"size": lambda n: f"{n / 1e6:g} MB"}`. The default is `str`.
    alt
        What a picture says in words: a string, or a function of the axes. The default names the choice
        ("ranks 4, step 3"). Pictures that bring their own text (a `Picture`) keep it.
    start
        The value an axis starts at: `{"ranks": 4}`. The default is its first.
    interval
        Milliseconds between two steps when Play runs.
    max_frames, max_bytes
        Limits on the number of combinations, and on the summed size of the different frames.
    **axes
        The axes, in the order of the sliders. A page holds every frame, so keep the grid small.

    Returns
    -------
    Explorer
        Shows itself when it is the last line of a cell. `explorer.widget` is the ipywidgets object.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it got and what it takes.

    Examples
    --------
    >>> explore(lambda ranks, step: f"rank {step % ranks} sends", ranks=(2, 4), step=range(3))
    explore(ranks: 2 | 4, step: 0…2)
    """
    if not callable(frame):
        raise TypeError(f"frame must be a function of the axes, got {type(frame).__name__}")
    if not axes:
        raise TypeError("explore needs at least one axis, such as ranks=(2, 4, 8)")
    for name, given in {"labels": labels, "formats": formats, "start": start}.items():
        _check_mapping(name, given, axes)
    for name, text in (labels or {}).items():
        _check_text(f"labels[{name!r}]", text)
    for name, rule in (formats or {}).items():
        if not callable(rule):
            raise TypeError(f"formats[{name!r}] must be a function of a value, got {type(rule).__name__}")
    if alt is not None and not isinstance(alt, str) and not callable(alt):
        raise TypeError(f"alt must be a string or a function of the axes, got {type(alt).__name__}")
    for name, number in {"interval": interval, "max_frames": max_frames, "max_bytes": max_bytes}.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be a whole number, got {number!r}")
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    grid = _Grid(axes, dict(labels or {}), dict(formats or {}), dict(start or {}), max_frames)
    return Explorer(grid, _Frames(frame, grid, alt, max_bytes), interval)


class Explorer:
    """The result of `explore`: shows itself, and has a short text form that never changes."""

    def __init__(self, grid: _Grid, frames: _Frames, interval: int):
        self._text = grid.describe()
        self._frames = frames
        first = grid.first()
        self._fallback = frames.mime[frames.at[first]]
        build = _Linked if hasattr(widgets, "Stack") else _Observed
        #: The ipywidgets object, to place among other widgets.
        self.widget: widgets.Widget = build(grid, frames, interval).box

    def __repr__(self) -> str:
        return self._text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        kind, text = self._fallback
        return {
            "text/plain": self._text,
            kind: text,
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.widget.model_id,
            },
        }


# --- the grid -----------------------------------------------------------------------------------------------


class _Axis:
    """One axis for one choice of the axes it depends on: values, their labels, and whether it steps."""

    def __init__(self, name: str, values: list, texts: list[str], stepping: bool, start: int):
        self.name, self.values, self.texts, self.stepping, self.start = name, values, texts, stepping, start


class _Grid:
    """The axes, resolved: which values each takes, given the values of the axes before it."""

    def __init__(self, axes: dict, labels: dict, formats: dict, start: dict, max_frames: int):
        self.names = list(axes)
        self.labels = {name: labels.get(name, name.replace("_", " ")) for name in axes}
        self._formats, self._start, self._given = formats, start, axes
        self._parents: dict[str, list[str]] = {}
        self._cache: dict[tuple, _Axis] = {}
        for place, (name, given) in enumerate(axes.items()):
            self._parents[name] = self._find_parents(name, given, self.names[:place])
        self.points: list[tuple] = []
        self._walk((), max_frames)
        for name, value in start.items():
            if not any(value in axis.values for axis in self._resolved(name)):
                raise ValueError(f"start[{name!r}] is {value!r}, which is not a value of axis {name!r}")

    def parents(self, name: str) -> list[str]:
        """The axes that decide which slider stands for `name`, in order."""
        return self._parents[name]

    def axis(self, name: str, chosen: Mapping[str, Any]) -> _Axis:
        """Axis `name`, given the values of the axes before it."""
        key = (name, *(chosen[p] for p in self._parents[name]))
        if key not in self._cache:
            self._cache[key] = self._resolve(name, chosen)
        return self._cache[key]

    def first(self) -> tuple:
        """The point shown at the start."""
        chosen: dict[str, Any] = {}
        for name in self.names:
            axis = self.axis(name, chosen)
            chosen[name] = axis.values[axis.start]
        return tuple(chosen.values())

    def describe(self) -> str:
        parts = []
        for name in self.names:
            found = self._resolved(name)
            if len({tuple(a.texts) for a in found}) > 1:
                what = "by " + " and ".join(self._named_parents(name))
            elif found[0].stepping and len(found[0].texts) > 1:
                what = f"{found[0].texts[0]}…{found[0].texts[-1]}"
            else:
                texts = found[0].texts
                what = " | ".join(texts if len(texts) <= 8 else [*texts[:3], "…", texts[-1]])
            parts.append(f"{name}: {what}")
        return f"explore({', '.join(parts)})"

    def _resolved(self, name: str) -> list[_Axis]:
        return [axis for (key, *_), axis in self._cache.items() if key == name]

    def _named_parents(self, name: str) -> list[str]:
        return list(inspect.signature(self._given[name]).parameters)

    def _find_parents(self, name: str, given: Any, earlier: list[str]) -> list[str]:
        if not callable(given):
            return []
        found: set[str] = set()
        wanted = self._named_parents(name)
        for parameter in wanted:
            if parameter not in earlier:
                raise ValueError(
                    f"axis {name!r} is a function of {parameter!r}, which is not an axis before it"
                    f" (those are: {', '.join(earlier) or 'none'})"
                )
            found |= {parameter, *self._parents[parameter]}
        return [n for n in earlier if n in found]

    def _resolve(self, name: str, chosen: Mapping[str, Any]) -> _Axis:
        given, where = self._given[name], f"axis {name!r}"
        if callable(given):
            arguments = {p: chosen[p] for p in self._named_parents(name)}
            given = given(**arguments)
            where += " at " + ", ".join(f"{k}={v!r}" for k, v in arguments.items())
        if isinstance(given, Mapping):
            texts, values = [str(k) for k in given], list(given.values())
        elif isinstance(given, (tuple, list, range)):
            values = list(given)
            write = self._formats.get(name, str)
            texts = [write(value) for value in values]
        else:
            raise TypeError(
                f"{where} must be a tuple, list, range, dict or a function that returns one, got {given!r:.80}"
            )
        if not values:
            raise ValueError(f"{where} has no values")
        for text in texts:
            _check_text(f"the label of a value of {where}", text)
        if len(set(texts)) < len(texts):
            raise ValueError(f"{where} has two values with the same label: {texts}")
        for value in values:
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{where} has the value {value!r:.60}, which can't be hashed; use plain values or tuples"
                ) from None
        start = values.index(self._start[name]) if self._start.get(name, _NOTHING) in values else 0
        return _Axis(name, values, texts, isinstance(given, range), start)

    def _walk(self, point: tuple, max_frames: int) -> None:
        if len(point) == len(self.names):
            self.points.append(point)
            if len(self.points) > max_frames:
                raise ValueError(
                    f"this grid has more than max_frames={max_frames} combinations of {', '.join(self.names)};"
                    " use fewer values: the page holds every frame"
                )
            return
        for value in self.axis(self.names[len(point)], dict(zip(self.names, point))).values:
            self._walk((*point, value), max_frames)


# --- the frames ---------------------------------------------------------------------------------------------


class _Frames:
    """Every different frame once: `html[at[point]]` is what the browser shows."""

    def __init__(self, frame: Callable, grid: _Grid, alt: str | Callable | None, max_bytes: int):
        self.html: list[str] = []
        self.mime: list[tuple[str, str]] = []
        self.at: dict[tuple, int] = {}
        known: dict[str, int] = {}
        total = 0
        for point in grid.points:
            chosen = dict(zip(grid.names, point))
            where = "frame(" + ", ".join(f"{k}={v!r}" for k, v in chosen.items()) + ")"
            kind, text = _picture(frame(**chosen), where, _words(alt, grid, chosen))
            markup = {"image/svg+xml": text, "text/html": text}.get(kind) or f"<pre>{html.escape(text)}</pre>"
            if markup not in known:
                known[markup] = len(self.html)
                self.html.append(markup)
                self.mime.append(("text/html", markup) if kind == "text/plain" else (kind, text))
                total += len(markup.encode())
                if total > max_bytes:
                    raise ValueError(
                        f"the frames are larger than max_bytes={max_bytes:,} together"
                        f" ({len(self.html)} different ones so far, about {total // len(self.html):,} bytes each,"
                        f" {len(grid.points)} combinations); draw less in each or use fewer values"
                    )
            self.at[point] = known[markup]


def _words(alt: str | Callable | None, grid: _Grid, chosen: dict[str, Any]) -> str | None:
    if callable(alt):
        text = alt(**chosen)
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"alt must return a non-empty string, got {text!r} for {chosen}")
        return text
    seen: dict[str, Any] = {}
    said = []
    for name in grid.names:
        axis = grid.axis(name, seen)
        seen[name] = chosen[name]
        said.append(f"{grid.labels[name]} {axis.texts[axis.values.index(chosen[name])]}")
    return f"{alt} ({', '.join(said)})" if alt else ", ".join(said)


def _picture(thing: Any, where: str, alt: str) -> tuple[str, str]:
    """(MIME type, text) for what a frame returned."""
    if thing is None:
        return "text/html", _NOTHING
    if isinstance(thing, Picture):
        return "image/svg+xml", thing.svg
    if isinstance(thing, Figure):
        svg = to_svg(thing)
        if "matplotlib.pyplot" in sys.modules:  # else pyplot would show it once more at the end of the cell
            sys.modules["matplotlib.pyplot"].close(thing)
        return "image/svg+xml", with_alt(svg, alt)
    if isinstance(thing, str):
        if thing.lstrip().startswith(("<svg", "<?xml")) and "<svg" in thing:
            return "image/svg+xml", _named(thing[thing.index("<svg") :], alt)
        return "text/plain", thing
    bundle = {}
    if callable(getattr(thing, "_repr_mimebundle_", None)):
        bundle = thing._repr_mimebundle_() or {}
        bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    for kind, method in (
        ("image/svg+xml", "_repr_svg_"),
        ("text/html", "_repr_html_"),
        ("image/png", "_repr_png_"),
    ):
        text = bundle.get(kind)
        if text is None and callable(getattr(thing, method, None)):
            text = getattr(thing, method)()
        if text is None:
            continue
        if kind == "image/png":
            data = text if isinstance(text, str) else base64.b64encode(text).decode()
            return "text/html", f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}">'
        return kind, _named(text[text.index("<svg") :], alt) if kind == "image/svg+xml" else text
    raise TypeError(
        f"{where} must return a matplotlib Figure, an SVG, an object that shows itself as SVG or HTML, a string"
        f" or None, got {type(thing).__name__}"
    )


def _named(svg: str, alt: str) -> str:
    return svg if "aria-label=" in svg[: svg.index(">")] else with_alt(svg, alt)


# --- the widgets --------------------------------------------------------------------------------------------


class _Controls:
    """One slider (and Play) per axis, or per choice of the axes that an axis depends on."""

    def __init__(self, grid: _Grid, interval: int):
        self._grid, self._interval = grid, interval
        self._made: dict[tuple, tuple[Any, widgets.Widget]] = {}

    def get(self, name: str, chosen: Mapping[str, Any]) -> tuple[Any, widgets.Widget]:
        """(the slider or None, the row that holds it) for axis `name`."""
        key = (name, *(chosen[p] for p in self._grid.parents(name)))
        if key not in self._made:
            self._made[key] = self._make(self._grid.axis(name, chosen))
        return self._made[key]

    def _make(self, axis: _Axis) -> tuple[Any, widgets.Widget]:
        label = self._grid.labels[axis.name]
        if len(axis.values) == 1:  # a slider with one place to be breaks the slider library
            return None, widgets.Label(f"{label}: {axis.texts[0]}")
        slider = widgets.SelectionSlider(
            options=axis.texts,
            index=axis.start,
            description=label,
            continuous_update=True,
            style={"description_width": "initial"},
            layout={"width": "auto", "flex": "1 1 260px", "max_width": "460px"},
        )
        row = [slider]
        if axis.stepping:
            play = widgets.Play(
                min=0,
                max=len(axis.values) - 1,
                value=axis.start,
                interval=self._interval,
                layout={"flex": "0 0 auto"},
            )
            widgets.jslink((play, "value"), (slider, "index"))
            row.insert(0, play)
        box = widgets.HBox(row, layout={"flex_flow": "row wrap", "align_items": "center", "width": "100%"})
        box.add_class("mr-control")
        return slider, box


def _html_widgets(frames: _Frames) -> list[widgets.HTML]:
    """One HTML widget per different frame; layout and style are shared, so that each costs little."""
    layout, made = widgets.Layout(width="100%"), []
    shared: dict[str, Any] = {"layout": layout}
    for text in frames.html:
        made.append(widgets.HTML(text, **shared))
        made[-1].add_class("mr-frame")
        shared.setdefault("style", made[0].style)
    return made


class _Linked:
    """Sliders and stacks joined in the browser (ipywidgets 8 and later)."""

    def __init__(self, grid: _Grid, frames: _Frames, interval: int):
        self._grid, self._frames = grid, frames
        self._controls = _Controls(grid, interval)
        self._leaves = _html_widgets(frames)
        self._layout = widgets.Layout(width="100%")
        self._stacks: dict[tuple, widgets.Widget] = {}
        rows = [self._row(name, grid.parents(name), {}) for name in grid.names]
        self.box = widgets.VBox([*rows, self._level(0, {})], layout={"width": "100%"})
        self.box.add_class("mr-explore")

    def _row(self, name: str, parents: list[str], chosen: dict) -> widgets.Widget:
        if not parents:
            return self._controls.get(name, chosen)[1]
        return self._stack(parents[0], chosen, lambda c: self._row(name, parents[1:], c))

    def _level(self, depth: int, chosen: dict) -> widgets.Widget:
        if depth == len(self._grid.names):
            return self._leaves[self._frames.at[tuple(chosen[n] for n in self._grid.names)]]
        return self._stack(self._grid.names[depth], chosen, lambda c: self._level(depth + 1, c))

    def _stack(self, name: str, chosen: dict, child: Callable[[dict], widgets.Widget]) -> widgets.Widget:
        axis = self._grid.axis(name, chosen)
        slider = self._controls.get(name, chosen)[0]
        children = [child({**chosen, name: value}) for value in axis.values]
        if all(c is children[0] for c in children):
            return children[0]
        key = (id(slider), *(id(c) for c in children))
        if key not in self._stacks:
            stack = widgets.Stack(children, selected_index=axis.start, layout=self._layout)
            widgets.jslink((slider, "index"), (stack, "selected_index"))
            self._stacks[key] = stack
        return self._stacks[key]


class _Observed:
    """The same with ipywidgets 7, which has no Stack (Colab has shipped it): needs a running kernel."""

    def __init__(self, grid: _Grid, frames: _Frames, interval: int):
        self._grid, self._frames = grid, frames
        self._controls = _Controls(grid, interval)
        self._view = widgets.HTML(layout={"width": "100%"})
        self.box = widgets.VBox(layout={"width": "100%"})
        seen = set()
        for point in grid.points:
            for name in grid.names:
                slider = self._controls.get(name, dict(zip(grid.names, point)))[0]
                if slider is not None and id(slider) not in seen:
                    seen.add(id(slider))
                    slider.observe(self._update, "index")
        self._update()

    def _update(self, change: Any = None) -> None:
        chosen: dict[str, Any] = {}
        rows = []
        for name in self._grid.names:
            slider, row = self._controls.get(name, chosen)
            rows.append(row)
            chosen[name] = self._grid.axis(name, chosen).values[slider.index if slider is not None else 0]
        if tuple(self.box.children) != (*rows, self._view):
            self.box.children = (*rows, self._view)
        self._view.value = self._frames.html[self._frames.at[tuple(chosen.values())]]


# --- checks -------------------------------------------------------------------------------------------------


def _check_mapping(name: str, given: Any, axes: Mapping[str, Any]) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict from an axis's name, got {type(given).__name__}")
    for key in given:
        if key not in axes:
            raise ValueError(f"{name} has {key!r}, which is not an axis (the axes are: {', '.join(axes)})")


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text.strip():
        raise TypeError(f"{name} must be a non-empty string, got {text!r}")
    if "$" in text or "\\(" in text:
        raise ValueError(f"{name} is {text!r}: widgets can't show formulas; write it in words")
