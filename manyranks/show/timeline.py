"""`timeline`: what every rank of a `Run` did when, drawn from the run and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from manyranks.runtime.run import Run, human_bytes, human_seconds

from .lanes import Lane, lanes_of, port_shares, simplify
from .pen import WIDTH, Pen, check_words, nice_ticks, text_width
from .style import COLORS, ON_FILL, Picture

__all__ = ["timeline"]

MOST_RANKS = 16  # drawn when the caller does not choose
MOST_ARROWS = 48
MOST_WORDS = 120

_COMPUTE = ("blue", "orange", "green", "purple", "pink")  # with the textures of the same index
_UNITS = ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (float("inf"), 1.0, "s"))


def timeline(
    run: Run,
    ranks: Iterable[int] | None = None,
    since: float = 0.0,
    until: float | None = None,
    title: str | None = None,
    alt: str | None = None,
    *,
    ports: bool = False,
    messages: bool | None = None,
    idle: bool | None = None,
    name: str = "rank",
    width: float = WIDTH,
) -> Picture:
    """Draw what every rank did when.

    One row a rank. Computing is a full bar, one colour and texture for each kind of label ("F 0", "F 1" are one kind,
    and the number stands in the bar). Waiting for communication is a low hollow bar. A collective started with
    ``async_op=True`` is a thin bar below its rank's row. Messages are arrows from sender to receiver where there are few.

    Parameters
    ----------
    run
        A `Run`, of `simulate` or of `launch`.
    ranks
        The ranks to draw, in this order, e.g. ``range(4)``. The default is the first 16.
    since, until
        Where the time axis begins and ends, in seconds. Give several pictures the same `until` to compare them.
    title, alt
        Words above the picture, and its alternative text. The default `alt` is made from the run.
    ports
        Draw when each rank's port is sending ("out") and receiving ("in"), and for what share of the run, in place of
        the arrows: a naive all-reduce's hotspot is a port of rank 0 that is full while the others' are empty. Where the
        run computes nothing, the ranks' own rows are left out.
    messages
        True or False to draw the arrows or not. The default draws them if there are at most 48.
    idle
        Whether to print, at the right, the share of the run in which a rank computed nothing. The default prints it
        where the run has computing in it.
    name, width
        What a row is called ("rank", or "stage", "GPU"), and the picture's width in pixels.

    Returns
    -------
    Picture
        Shows itself; a frame for `explore`. Bars too thin to be seen are joined, and the picture says so.

    Raises
    ------
    TypeError, ValueError
        Naming the argument: no `Run`, a rank that is not in it, an axis that ends before it begins.
    """
    chosen, left_out = _choose(run, ranks)
    end = _axis_end(run, since, until)
    check_words(title=title, alt=alt, name=name)
    wide = _check_width(width)
    arrows, arrows_note = _arrows(run, chosen, since, end, ports, messages)
    lanes, computing = lanes_of(run, chosen, since, end, ports, keep=bool(messages or idle))
    words = len(chosen) <= 16
    idle = words and (computing and not ports if idle is None else bool(idle))

    # Geometry: heights by how many ranks share the picture.
    size = next(s for most, s in ((8, 18), (16, 14), (32, 9), (10**9, 5)) if len(chosen) <= most)
    left = (
        14
        + text_width(f"{name} {max(chosen)}" if words else str(max(chosen)), 13)
        + (22 if ports and words else 0)
    )
    right = 52 if idle or (ports and words) else 14
    top = 26 if title else 8
    if idle:
        top += 14
    scale = (wide - left - right) / (end - since)

    def x(t: float) -> float:
        return left + (t - since) * scale

    y = top
    for rank in chosen:
        for lane in (lane for lane in lanes if lane.rank == rank):
            lane.height = (
                size if lane.row == "main" else max(2.0, round(size * (0.5 if lane.row == "side" else 0.6)))
            )
            lane.y = y
            y += lane.height + (2 if size > 5 else 1)
        y += max(10, size // 2) if arrows else max(2, size // 3)
    bottom = y

    bars_before = sum(len(lane.bars) for lane in lanes)
    how = simplify(lanes, scale)
    pen = Pen(wide)
    if title:
        pen.texts([(4, 12, title)], 13, bold=True)
    time_note = _axis(pen, x, since, end, bottom, top, run.world)
    _bars(pen, lanes, x, words and how != "coarse", size)
    lines = [a for a in arrows if not a[2]], [a for a in arrows if a[2]]
    middle = {lane.rank: lane for lane in lanes if lane.row == "main"}
    for group, dash in zip(lines, ("", "4 2")):
        pen.arrows([_arrow(m, middle, x, since, end) for m, _, _ in group], 1, 5, "mr-message", dash)
    _names(pen, chosen, lanes, name, words, left, ports)
    if idle:
        share = 1 - run.busy("compute")[list(chosen)] / (run.seconds or 1)
        pen.texts([(wide - 8, top - 8, "idle")], 11, "end")
        pen.texts([(wide - 8, middle[r].y + size / 2, _percent(s)) for r, s in zip(chosen, share)], 12, "end")
    busy = port_shares(run, chosen) if ports else {}
    if ports and words:
        rows = [
            (wide - 8, lane.y + lane.height / 2, _percent(busy[lane.rank, lane.row]))
            for lane in lanes
            if lane.row in ("out", "in")
        ]
        pen.texts(rows, min(11, size * 0.75), "end")

    below = _legend(pen, lanes, bottom + 46, lines)
    notes = [time_note]
    if left_out:
        notes.append(f"{len(chosen)} of {run.ranks} {name}s drawn.")
    if how == "joined":
        notes.append("Bars under a pixel wide are joined.")
    if how == "coarse":
        notes.append(
            f"{bars_before:,} intervals, drawn to the pixel: each shows what filled most of it,"
            " low where it was mostly idle."
        )
    if arrows_note:
        notes.append(arrows_note)
    notes = [note for note in notes if note]
    if notes:
        below = pen.paragraph(8, below + 8, " ".join(notes), 11)
    return pen.done(round(below) + 2, alt or _say(run, chosen, computing, name, busy))


# --- what is in the picture ---------------------------------------------------------------------------------


def _choose(run: Any, ranks: Any) -> tuple[list[int], bool]:
    if not isinstance(run, Run):
        raise TypeError(f"run must be a Run, as simulate and launch return it, got {type(run).__name__}")
    if ranks is None:
        return list(range(min(run.ranks, MOST_RANKS))), run.ranks > MOST_RANKS
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise TypeError(f"ranks must be the rank numbers to draw, such as range(4), got {ranks!r}")
    chosen = list(ranks)
    for rank in chosen:
        if isinstance(rank, bool) or not hasattr(rank, "__index__"):
            raise TypeError(f"ranks must hold whole numbers, got {rank!r}")
        if not 0 <= rank < run.ranks:
            raise ValueError(f"ranks must be between 0 and {run.ranks - 1}, got {rank}")
    chosen = [int(rank) for rank in chosen]
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"ranks must name at least one rank and none twice, got {chosen}")
    if len(chosen) > 128:
        raise ValueError(f"ranks must be at most 128, got {len(chosen)}: more rows can't be told apart")
    return chosen, len(chosen) < run.ranks


def _axis_end(run: Run, since: Any, until: Any) -> float:
    for argument, value in (("since", since), ("until", until)):
        if value is None and argument == "until":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
            raise TypeError(f"{argument} must be a number of seconds, got {value!r}")
        if not 0 <= float(value) < float("inf"):
            raise ValueError(f"{argument} must be a finite number of seconds, at least 0, got {value!r}")
    end = float(run.seconds if until is None else until)
    if until is None and end <= since:
        end = since + 1e-6  # a run in which no time passed still has an axis
    if end <= since:
        raise ValueError(f"until must be after since={since!r}, got {until!r}")
    return end


def _check_width(width: Any) -> float:
    if isinstance(width, bool) or not isinstance(width, (int, float)):
        raise TypeError(f"width must be a number of pixels, got {width!r}")
    if not 240 <= width <= 2000:
        raise ValueError(f"width must be between 240 and 2000 pixels, got {width!r}")
    return float(width)


def _arrows(
    run: Run, chosen: list[int], since: float, end: float, ports: bool, messages: Any
) -> tuple[list[tuple], str]:
    """The messages to draw as (message, from, between nodes?), and what to say of those that are not."""
    if messages not in (None, True, False):
        raise TypeError(f"messages must be True, False or None, got {messages!r}")
    if not isinstance(ports, bool):
        raise TypeError(f"ports must be True or False, got {ports!r}")
    if messages is False or (ports and messages is None):
        return [], ""
    if run.nominal and messages is None:
        return [], "Messages are nominal here and not drawn."
    if messages is None and len(run.traffic) > 50 * MOST_ARROWS:
        return [], f"{run.traffic.count:,} messages, not drawn."
    wanted = set(chosen)
    seen = [
        m
        for m in run.traffic
        if m.source in wanted and m.destination in wanted and m.end > since and m.start < end
    ]
    if messages is None and len(seen) > MOST_ARROWS:
        return [], f"{len(seen):,} messages, not drawn."
    return [(m, m.source, m.tier > 0) for m in seen], ""


# --- drawing ------------------------------------------------------------------------------------------------


def _look(lanes: list[Lane]) -> dict[str, tuple[str, int]]:
    """Colour and texture for each kind of computation, in the order in which they first happen."""
    first: dict[str, tuple[float, int]] = {}
    for lane in lanes:
        for bar in lane.bars:
            if bar.kind.startswith("compute:"):
                first[bar.kind] = min(first.get(bar.kind, (bar.start, lane.rank)), (bar.start, lane.rank))
    look = {}
    for place, kind in enumerate(sorted(first, key=lambda k: (*first[k], k))):
        look[kind] = (COLORS[_COMPUTE[place]], place) if place < len(_COMPUTE) else (COLORS["grey"], 0)
    return look


def _bars(pen: Pen, lanes: list[Lane], x: Any, words: bool, size: float) -> None:
    look = _look(lanes)
    boxes: dict[str, list] = {}
    labels: dict[str, list] = {}  # kind -> (box, label, number)
    for lane in lanes:
        for bar in lane.bars:
            x0, x1 = x(bar.start), x(bar.end)
            wide = x1 - x0 - 0.8 if x1 - x0 > 3 else x1 - x0
            y, h = lane.y, lane.height
            if bar.kind == "wait":
                low = max(2, round(h * 0.6))
                y, h = y + (h - low) / 2, low
            if bar.number == "low":
                y, h = y + h * 0.7, max(1, h * 0.3)
            box = (x0, y, wide, h)
            boxes.setdefault(bar.kind, []).append(box)
            labels.setdefault(bar.kind, []).append((box, bar.label, bar.number))
    for kind, (color, texture) in look.items():
        pen.boxes(boxes[kind], color, "mr-compute")
        pen.texture([b for b in boxes[kind] if b[2] >= 2], texture)
    pen.boxes(boxes.get("wait", []), "", "mr-wait", 0.75, 0.8)
    pen.boxes(boxes.get("comm", []), COLORS["teal"], "mr-comm")
    pen.boxes(boxes.get("out", []), COLORS["blue"], "mr-out")
    pen.boxes(boxes.get("in", []), COLORS["orange"], "mr-in")
    if not words or size < 12:
        return
    named = [entry for kind in look for entry in labels[kind]]
    full = all(_fits(label, 11, box) for box, label, number in named if number)
    room = MOST_WORDS
    for kind in [*look, "comm", "wait"]:
        said = []
        font = 11 if kind in look else 9
        for box, label, number in labels.get(kind, []):
            if kind == "wait" and label in ("send", "recv"):
                continue
            text = number if number and not full else label
            if _fits(text, font, box) and box[3] >= font - 1 and room > len(said):
                lift = 1.5 if kind in look and look[kind][1] else 0
                said.append((box[0] + box[2] / 2, box[1] + box[3] / 2 - lift, text))
        room -= len(said)
        pen.texts(said, font, "middle", fill="" if kind == "wait" else ON_FILL)


def _fits(text: str, size: float, box: tuple) -> bool:
    return bool(text) and text_width(text, size) + 1 <= box[2] + 0.8


def _arrow(m: Any, middle: dict[int, Lane], x: Any, since: float, end: float) -> list[tuple[float, float]]:
    a, b = middle[m.source], middle[m.destination]
    down = b.y > a.y
    ya = a.y + a.height * (0.72 if down else 0.28)
    yb = b.y + b.height * (0.28 if down else 0.72)
    points = [(x(m.start), ya), (x(m.end), yb)]
    if m.end > end or m.start < since:  # cut to the axis along the line
        slope = (yb - ya) / (m.end - m.start or 1)
        t0, t1 = max(m.start, since), min(m.end, end)
        points = [(x(t0), ya + (t0 - m.start) * slope), (x(t1), ya + (t1 - m.start) * slope)]
    return points


def _axis(pen: Pen, x: Any, since: float, end: float, bottom: float, top: float, world: str) -> str:
    scale, unit = next((s, u) for limit, s, u in _UNITS if end < limit)
    ticks = nice_ticks(since * scale, end * scale)
    offset = ""
    if len({f"{t:g}" for t in ticks}) < len(ticks):  # a short stretch of a long run
        ticks, offset = nice_ticks(0, (end - since) * scale), f" after {since * scale:.6g} {unit}"
    at = [x(t / scale + (since if offset else 0)) for t in ticks]
    pen.lines([[(t, top), (t, bottom)] for t in at], 1, "mr-grid", 0.2)
    pen.lines([[(x(since), bottom), (x(end), bottom)]], 1)
    pen.texts([(t, bottom + 11, f"{value:g}") for t, value in zip(at, ticks)], 12, "middle")
    kind = "simulated" if world == "simulated" else "measured"
    pen.texts([((x(since) + x(end)) / 2, bottom + 27, f"time in {unit}{offset}, {kind}")], 12, "middle")
    return "" if kind == "simulated" else f"Measured on {world}."


def _names(
    pen: Pen, chosen: list[int], lanes: list[Lane], name: str, words: bool, left: float, ports: bool
) -> None:
    spans: dict[int, list[float]] = {}
    for lane in lanes:
        span = spans.setdefault(lane.rank, [lane.y, lane.y])
        span[1] = lane.y + lane.height
    first = {lane.rank: lane for lane in reversed(lanes)}
    texts, last = [], -100.0
    for rank in chosen:
        a, b = spans[rank]
        y = (a + b) / 2 if ports else first[rank].y + first[rank].height / 2
        if y - last < 12:
            continue
        last = y
        texts.append((left - 8 - (22 if ports and words else 0), y, f"{name} {rank}" if words else str(rank)))
    pen.texts(texts, 13 if words else 11, "end")
    if ports and words:
        pen.texts(
            [(left - 4, lane.y + lane.height / 2, lane.row) for lane in lanes if lane.row in ("out", "in")],
            11 if lanes[-1].height > 8 else 9,
            "end",
        )


def _legend(pen: Pen, lanes: list[Lane], y: float, lines: tuple[list, list]) -> float:
    kinds = {bar.kind for lane in lanes for bar in lane.bars}
    entries: list[tuple[str, str]] = [(kind, kind.partition(":")[2]) for kind in _look(lanes)]
    if len(entries) > len(_COMPUTE):
        entries = [*entries[: len(_COMPUTE)], ("other", "other computing")]
    for kind, text in (
        ("wait", "waiting"),
        ("comm", "collective under way"),
        ("out", "port sends (upper)"),
        ("in", "port receives (lower)"),
    ):
        if kind in kinds:
            entries.append((kind, text))
    for found, kind, text in zip(lines, ("arrow", "dashed"), ("message", "message between nodes")):
        if found:
            entries.append((kind, text))
    if not entries:
        return y - 8
    look = _look(lanes)
    x = x0 = 8.0
    for kind, text in entries:
        need = 26 + text_width(text, 12) * 0.95 + 12
        if x > x0 and x + need > pen.width:
            x, y = x0, y + 17
        if kind in look or kind == "other":
            color, texture = look.get(kind, (COLORS["grey"], 0))
            pen.boxes([(x, y - 6, 20, 12)], color)
            pen.texture([(x, y - 6, 20, 12)], texture)
        elif kind == "wait":
            pen.boxes([(x, y - 4, 20, 8)], "", "", 0.75, 0.8)
        elif kind in ("arrow", "dashed"):
            pen.arrows([[(x, y), (x + 20, y)]], 1, 5, "", "4 2" if kind == "dashed" else "")
        else:
            pen.boxes([(x, y - 4, 20, 8)], COLORS[{"comm": "teal", "out": "blue", "in": "orange"}[kind]])
        pen.texts([(x + 25, y, text)], 12)
        x += need
    return y + 8


def _percent(share: float) -> str:
    share = 100 * min(max(share, 0), 1)
    return f"{share:.0f} %" if share >= 1 or share == 0 else f"{max(share, 0.1):.1f} %"


def _range(shares: Sequence[float]) -> str:
    low, high = _percent(min(shares)), _percent(max(shares))
    return high if low == high else f"{low.removesuffix(' %')} to {high}"


def _say(run: Run, chosen: list[int], computing: bool, name: str, busy: dict) -> str:
    many = f"{run.ranks} {name}{'s' * (run.ranks != 1)}"
    how = "simulated" if run.world == "simulated" else f"measured on {run.world}"
    said = [f"Timeline of {many} over {human_seconds(run.seconds)}, {how}:"]
    if computing:
        said.append(f"each computes {_range(list(run.busy('compute') / (run.seconds or 1)))} of the time;")
    if busy:
        for row, verb in (("out", "sends"), ("in", "receives")):
            of = {rank: share for (rank, r), share in busy.items() if r == row}
            most = max(of, key=lambda rank: of[rank])
            others = [share for rank, share in of.items() if rank != most]
            if not others or _percent(of[most]) == _percent(min(others)):
                said.append(f"each port {verb} {_percent(of[most])} of the time;")
            else:
                said.append(
                    f"{name} {most}'s port {verb} {_percent(of[most])} of the time, the others' {_range(others)};"
                )
    count = run.traffic.count
    said.append(f"{count:,} message{'s' * (count != 1)}, {human_bytes(run.traffic.bytes)}")
    return " ".join(said) + "."
