"""What a `timeline` draws: rows of bars read off a `Run`, and how they are thinned out where there are too many."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from manyranks.runtime.hardware import Cluster
from manyranks.runtime.run import Run

__all__ = ["Bar", "Lane", "lanes_of", "port_shares", "port_spans", "simplify"]

MOST_BARS = 320  # more are drawn to the pixel


class Bar(NamedTuple):
    """A stretch of time of one kind."""

    kind: str  # "wait", "comm", "out", "in" or "compute:<stem>"
    start: float
    end: float
    label: str = ""
    number: str = ""


@dataclass
class Lane:
    """A row of bars, and where it is drawn."""

    rank: int
    row: str  # "main", "side", "out" or "in"
    bars: list[Bar] = field(default_factory=list)
    y: float = 0
    height: float = 0


def lanes_of(
    run: Run, chosen: list[int], since: float, end: float, ports: bool, keep: bool
) -> tuple[list[Lane], bool]:
    """The rows to draw, each with its bars in order of time, cut to the axis; and whether anything was computed."""
    lanes: dict[tuple, Lane] = {}
    wanted = set(chosen)
    computing = False
    for i in run.timeline:
        computing = computing or i.kind == "compute"
        if i.rank not in wanted or i.end <= since or i.start >= end or i.end <= i.start:
            continue
        lane = lanes.setdefault((i.rank, 0, i.lane), Lane(i.rank, "main" if i.lane == 0 else "side"))
        kind, number = i.kind, ""
        if kind == "compute":
            stem, number = _stem(i.label)
            kind = f"compute:{stem}"
        lane.bars.append(Bar(kind, max(i.start, since), min(i.end, end), i.label, number))
    for rank in chosen:
        lanes.setdefault((rank, 0, 0), Lane(rank, "main"))
    if ports:
        if not computing and not keep:
            lanes = {key: lane for key, lane in lanes.items() if lane.row != "main"}
        for rank, row, spans in port_spans(run, wanted):
            cut = [Bar(row, max(a, since), min(b, end)) for a, b in spans if b > since and a < end]
            lanes[rank, 1, row == "in"] = Lane(rank, row, cut)
    order = {rank: place for place, rank in enumerate(chosen)}
    return [lanes[key] for key in sorted(lanes, key=lambda k: (order[k[0]], k[1], k[2]))], computing


def port_spans(run: Run, wanted: set[int]) -> list[tuple[int, str, list[tuple[float, float]]]]:
    """(rank, "out" or "in", when that port was busy), for each rank and direction.

    A message keeps the sender's port for bytes / bandwidth from its start, and the receiver's for as long before its end;
    in between is latency. A real machine's bandwidth is not known: there a message counts from its start to its end.
    """
    spans: dict[tuple[int, str], list] = {(rank, row): [] for rank in sorted(wanted) for row in ("out", "in")}
    gaps = [1 / tier.bandwidth for tier in run.cluster.tiers] if isinstance(run.cluster, Cluster) else None
    for m in run.traffic:
        if m.source not in wanted and m.destination not in wanted:
            continue
        took = m.end - m.start
        if gaps is not None and m.count == 1:
            took = min(took, m.bytes * gaps[m.tier])
        if took <= 0:
            continue
        if m.source in wanted:
            spans[m.source, "out"].append((m.start, m.start + took))
        if m.destination in wanted:
            spans[m.destination, "in"].append((m.end - took, m.end))
    return [(rank, row, _union(found, run.seconds * 1e-9)) for (rank, row), found in spans.items()]


def _union(spans: list[tuple[float, float]], slack: float) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1] + slack:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


def port_shares(run: Run, chosen: list[int]) -> dict[tuple[int, str], float]:
    """For what share of the whole run each port was busy."""
    whole = run.seconds or 1
    return {
        (rank, row): sum(b - a for a, b in spans) / whole for rank, row, spans in port_spans(run, set(chosen))
    }


def _stem(label: str) -> tuple[str, str]:
    """("F", "12") for "F 12": the kind of a computation, and which one it is."""
    found = re.search(r"\d+", label)
    stem = " ".join(re.sub(r"[\s_:#()\[\]=,-]*\d+[\s_:#()\[\]=,-]*", " ", label).split())
    return stem or "compute", found.group() if found else ""


def simplify(lanes: list[Lane], scale: float) -> str:
    """Make what is drawn fit: join neighbours of one kind under a pixel, then draw by the pixel. Says what it did."""
    how = ""
    for lane in lanes:
        joined: list[Bar] = []
        for bar in lane.bars:
            last = joined[-1] if joined else None
            if (
                last is not None
                and last.kind == bar.kind
                and (bar.end - bar.start) * scale < 1
                and (bar.start - last.end) * scale < 1
            ):
                joined[-1] = last._replace(end=max(last.end, bar.end), label="", number="")
                how = "joined"
            else:
                joined.append(bar)
        lane.bars = joined
    if sum(len(lane.bars) for lane in lanes) <= MOST_BARS:
        return how
    cell = 1 / scale
    cells = [_cells(lane.bars, cell) for lane in lanes]
    for _ in range(5):
        for lane, filled in zip(lanes, cells):
            lane.bars = _winners(filled, cell)
        if sum(len(lane.bars) for lane in lanes) <= MOST_BARS:
            break
        cells, cell = [_pairs(filled) for filled in cells], 2 * cell
    return "coarse"


_Cells = dict[int, dict[str, float]]  # which cell of the time axis -> kind -> seconds of it


def _cells(bars: list[Bar], cell: float) -> _Cells:
    filled: _Cells = {}
    for kind, start, end, *_ in bars:
        for c in range(int(start / cell), int(end / cell) + 1):
            part = min(end, (c + 1) * cell) - max(start, c * cell)
            if part > 0:
                kinds = filled.setdefault(c, {})
                kinds[kind] = kinds.get(kind, 0.0) + part
    return filled


def _pairs(filled: _Cells) -> _Cells:
    """The same in cells of twice the length."""
    out: _Cells = {}
    for c, kinds in filled.items():
        into = out.setdefault(c // 2, {})
        for kind, part in kinds.items():
            into[kind] = into.get(kind, 0.0) + part
    return out


def _winners(filled: _Cells, cell: float) -> list[Bar]:
    """Each cell as a bar of the kind that filled most of it, "low" where less than that was filled by anything."""
    runs: list[list] = []  # kind, low, first cell, last cell
    for c in sorted(filled):
        kind, most = max(filled[c].items(), key=lambda item: item[1])
        low = "low" if most < cell - sum(filled[c].values()) else ""
        if runs and runs[-1][:2] == [kind, low] and runs[-1][3] == c - 1:
            runs[-1][3] = c
        else:
            runs.append([kind, low, c, c])
    return [Bar(kind, first * cell, (last + 1) * cell, "", low) for kind, low, first, last in runs]
