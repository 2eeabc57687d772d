"""A pen for diagrams of boxes, bars and arrows: it writes the SVG itself.

`style.canvas` can draw all of this, at a quarter of a second and a hundred bytes a bar. An explorer holds a hundred
frames, so the diagrams that are nothing but rectangles and words (`timeline`, `chunk_grid`, `before_after`) are
written directly: all boxes of a kind are one `<path>`. The look is `style`'s: same root element, same colours,
`currentColor` for ink. Nothing is referred to by id, so copies on one page can't disturb each other; textures are
dashed strokes, which need no `<pattern>`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from .style import _FONT, Picture

__all__ = ["TEXTURES", "WIDTH", "Pen", "check_words", "nice_ticks", "text_width"]

#: Width of a diagram in CSS pixels: a phone shows it at three quarters of its size, which 13 px text survives.
WIDTH = 480

Box = tuple[float, float, float, float]  # x, y, width, height
Point = tuple[float, float]

#: What tells the kinds of bar apart without colour: strokes over a box's lower part, as (dashes, weight, number of rows).
TEXTURES: list[tuple[str, float, int]] = [
    ("", 0, 0),
    ("1.2 2.8", 5, 1),
    ("", 1, 2),
    ("1.6 3", 1.6, 2),
    ("3.5 3.5", 5, 1),
]


def n(value: float) -> str:
    """A coordinate: to a tenth of a pixel, no trailing zero."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def text_width(text: str, size: float) -> float:
    """A safe (wide) guess of how many pixels `text` takes: the reader's font is not known here."""
    return 0.6 * size * len(text)


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most about `most` round numbers from `low` to `high`.

    >>> [float(t) for t in nice_ticks(0, 9.3)]
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    found = MaxNLocator(most - 1, steps=[1, 2, 5, 10]).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [t for t in found if low - slack <= t <= high + slack]


def check_words(**words: Any) -> None:
    """Refuse what is no title, alternative text or name; None is allowed for those with a default."""
    for argument, text in words.items():
        if text is not None and (not isinstance(text, str) or not text.strip()):
            raise TypeError(f"{argument} must be a non-empty string, got {text!r}")


class Pen:
    """Collects the parts of one picture. `done` makes the `Picture`."""

    def __init__(self, width: float = WIDTH):
        self.width = width
        self._parts: list[str] = []

    def boxes(
        self,
        boxes: Iterable[Box],
        fill: str = "",
        cls: str = "",
        opacity: float = 1,
        stroke: float = 0,
        dash: str = "",
        stroke_color: str = "currentColor",
    ) -> None:
        """Rectangles of one look. Without `fill` they are outlines of weight `stroke`."""
        d = "".join(f"M{n(x)} {n(y)}h{n(w)}v{n(h)}h{n(-w)}z" for x, y, w, h in boxes)
        if not d:
            return
        a = f' fill="{fill}"' if fill else ' fill="none"'
        if stroke:
            a += f' stroke="{stroke_color}" stroke-width="{n(stroke)}"'
        self._path(d, a, cls, opacity, dash)

    def texture(self, boxes: Iterable[Box], number: int) -> None:
        """Mark filled boxes as of kind `number`, along their lower edge so that a word above stays clear."""
        dashes, weight, rows = TEXTURES[number % len(TEXTURES)]
        d = ""
        for x, y, w, h in boxes:
            fat = min(weight, h / 3)
            for row in range(rows):
                d += f"M{n(x)} {n(y + h - 1 - fat / 2 - 3 * row)}h{n(w)}"
        if d:
            self._path(d, f' fill="none" stroke="#000" stroke-width="{n(weight)}"', "", 0.6, dashes)

    def lines(
        self,
        lines: Iterable[Sequence[Point]],
        weight: float = 1,
        cls: str = "",
        opacity: float = 1,
        dash: str = "",
        color: str = "currentColor",
    ) -> None:
        """Open polylines of one look."""
        d = ""
        for points in lines:
            rounded = [(round(x, 1), round(y, 1)) for x, y in points]
            (x, y), *_ = rounded
            d += f"M{n(x)} {n(y)}"
            for (x, y), (x1, y1) in zip(rounded, rounded[1:]):
                d += (
                    f"v{n(y1 - y)}"
                    if x1 == x
                    else f"h{n(x1 - x)}"
                    if y1 == y
                    else f"l{n(x1 - x)} {n(y1 - y)}"
                )
        if d:
            self._path(d, f' fill="none" stroke="{color}" stroke-width="{n(weight)}"', cls, opacity, dash)

    def arrows(
        self,
        arrows: Sequence[Sequence[Point]],
        weight: float = 1,
        head: float = 5,
        cls: str = "",
        dash: str = "",
        color: str = "currentColor",
    ) -> None:
        """Polylines that end in a filled head at their last point."""
        shafts, heads = [], ""
        for points in arrows:
            (x0, y0), (x1, y1) = points[-2:]
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1.0
            ux, uy = (x1 - x0) / length, (y1 - y0) / length
            bx, by, s = x1 - head * ux, y1 - head * uy, 0.45 * head
            shafts.append([*points[:-1], (bx, by)])
            heads += f"M{n(x1)} {n(y1)}L{n(bx - s * uy)} {n(by + s * ux)}L{n(bx + s * uy)} {n(by - s * ux)}z"
        self.lines(shafts, weight, cls, dash=dash, color=color)
        if heads:
            self._path(heads, "" if color == "currentColor" else f' fill="{color}"', "", 1, "")

    def texts(
        self,
        texts: Sequence[tuple[float, float, str]],
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
        fill: str = "",
        opacity: float = 1,
    ) -> None:
        """Words of one look, each centred on its y."""
        if not texts:
            return
        a = f' font-size="{n(size)}px"'
        a += f' text-anchor="{anchor}"' if anchor != "start" else ""
        a += ' font-weight="bold"' if bold else ""
        a += f' fill="{fill}"' if fill else ""
        a += f' opacity="{opacity:g}"' if opacity != 1 else ""
        drop = 0.36 * size
        if len(texts) == 1:
            ((x, y, text),) = texts
            self._parts.append(
                f'<text x="{n(x)}" y="{n(y + drop)}"{a}>{html.escape(text, quote=False)}</text>'
            )
            return
        inner = "".join(
            f'<text x="{n(x)}" y="{n(y + drop)}">{html.escape(t, quote=False)}</text>' for x, y, t in texts
        )
        self._parts.append(f"<g{a}>{inner}</g>")

    def paragraph(self, x: float, y: float, text: str, size: float = 12) -> float:
        """Words broken into lines at the picture's width; returns the y below them."""
        room, line, out = self.width - x - 4, "", []
        for word in text.split():
            if line and text_width(f"{line} {word}", size) * 0.9 > room:
                out.append(line)
                line = word
            else:
                line = f"{line} {word}".strip()
        out.append(line)
        self.texts([(x, y + i * 1.3 * size, line) for i, line in enumerate(out)], size)
        return y + len(out) * 1.3 * size

    def done(self, height: float, alt: str) -> Picture:
        """The picture, `height` pixels high."""
        w, h = n(self.width), n(height)
        least = round(0.7 * self.width)
        return Picture(
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mr-svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}"'
            f' style="max-width:100%;min-width:min({least}px,100vw);height:auto" color="#797979" fill="currentColor"'
            f' font-family="{_FONT}" font-size="13px" stroke-linejoin="round">{"".join(self._parts)}</svg>',
            alt,
        )

    def _path(self, d: str, attributes: str, cls: str, opacity: float, dash: str) -> None:
        a = attributes
        a += f' class="{cls}"' if cls else ""
        a += f' opacity="{opacity:g}"' if opacity != 1 else ""
        a += f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<path d="{d}"{a}/>')
