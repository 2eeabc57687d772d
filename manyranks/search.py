# Generated from chapters/07_3d_parallelism.ipynb by tools/export.py: edit the notebook, then run `make export`.
"""Every plan of a job on a cluster: enumerated, filtered by memory, ranked by the predicted step, explained."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from manyranks.models import Decoder, as_decoder
from manyranks.planner import (
    CONSTANTS,
    FURTHER_PARTS,
    RECOMPUTE,
    SCHEDULES,
    TIME_PARTS,
    Constants,
    Costs,
    Job,
    Prediction,
    Table,
    costs,
    predict,
)
from manyranks.runtime import Cluster
from manyranks.runtime.hardware import GPUS, check_count

__all__ = [
    "AXES",
    "LARGEST_MICRO_BATCH",
    "LARGEST_VIRTUAL",
    "NothingFits",
    "Ranking",
    "plan_table",
    "search",
    "stacked_bars",
    "step_bars",
]


def stacked_bars(
    rows: Mapping[str, Mapping[str, float]],
    order: Sequence[str],
    write: Callable[[float], str],
    title: str | None = None,
    *,
    limit: float | None = None,
    mark: float | None = None,
) -> Any:
    """A picture of bars, each stacked from parts.

    Args:
        rows: label -> part -> size.
        order: the parts' names, in the order of stacking, at most eight.
        write: how a total is written.
        title: words above.
        limit: where the axis ends; give it in an explorer, so that frames compare.
        mark: a size to mark with a dashed line.

    Returns: a `manyranks.show.Picture`.
    """
    from manyranks.show import COLORS
    from manyranks.show.pen import WIDTH, Pen

    if not rows:
        raise ValueError("rows must hold one or more, got none")
    totals = {label: sum(parts.values()) for label, parts in rows.items()}
    end = limit or max([*totals.values(), mark or 0.0]) or 1.0
    scale = (WIDTH - 76) / end
    shown = [k for k in order if any(row.get(k, 0) > 2e-3 * end for row in rows.values())]
    kinds = {k: (color, i) for i, (k, color) in enumerate(zip(order, COLORS.values()))}
    pen, y = Pen(), 8.0
    if title:
        pen.texts([(0, 8, title)], 13, bold=True)
        y = 30.0
    boxes: dict[str, list] = {k: [] for k in shown}
    top = y
    for label, parts in rows.items():
        y = pen.paragraph(0, y, label, 12) + 2
        x = 0.0
        for k in shown:
            width = min(parts.get(k, 0) * scale, WIDTH - 76 - x)
            if width > 0.2:
                boxes[k].append((x, y - 6, width, 16))
                x += width
        pen.texts([(x + 5, y + 2, write(totals[label]))], 12)
        y += 24
    for k, found in boxes.items():
        pen.boxes(found, kinds[k][0])
        pen.texture(found, kinds[k][1])
    if mark is not None:
        pen.lines([[(mark * scale, top), (mark * scale, y - 10)]], 1.5, dash="5 3")
    for i, k in enumerate(shown):
        at = (120 * (i % 4), y + 20 * (i // 4))
        swatch = [(at[0], at[1] - 6, 14, 13)]
        pen.boxes(swatch, kinds[k][0])
        pen.texture(swatch, kinds[k][1])
        pen.texts([(at[0] + 19, at[1], k)], 12)
    told = "; ".join(
        f"{label}: {write(totals[label])}, of which "
        + ", ".join(f"{k} {parts[k] / totals[label]:.0%}" for k in shown if parts.get(k))
        if totals[label]
        else label
        for label, parts in rows.items()
    )
    alt = f"{title + '. ' if title else ''}{told}"
    return pen.done(y + 20 * ((len(shown) + 3) // 4), alt)


AXES = ("tp", "pp", "micro_batch", "zero_stage", "schedule", "virtual_stages")
AXES = (*AXES, "recompute", "sequence_parallel", "cp", "ep", "ends_as_layers")
LARGEST_MICRO_BATCH = 16
LARGEST_VIRTUAL = 12


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _several(given: Any) -> list[Any]:
    """One value or several, as a list."""
    return [given] if np.isscalar(given) else list(given)


def _allowed(given: Any, values: Iterable[Any]) -> list[Any]:
    """Those of `values` that are in `given`, one value or several; all if it is None."""
    wanted = None if given is None else _several(given)
    return [value for value in values if wanted is None or value in wanted]


def _check_axes(allowed: Mapping[str, Any]) -> None:
    for name, given in allowed.items():
        if name not in AXES:
            raise TypeError(f"{name} is no axis; take {', '.join(AXES)}")
        for value in [] if given is None else _several(given):
            if name in ("schedule", "recompute"):
                takes = SCHEDULES if name == "schedule" else RECOMPUTE
                if value not in takes:
                    raise ValueError(f"{name} must be one of {', '.join(takes)}, got {value!r}")
            elif name in ("sequence_parallel", "ends_as_layers"):
                if not isinstance(value, (bool, np.bool_)):
                    raise TypeError(f"{name} must be True or False, got {value!r}")
            else:
                least = 0 if name == "zero_stage" else 1
                if check_count(name, value, least) > 3 and name == "zero_stage":
                    raise ValueError(f"zero_stage must be 0, 1, 2 or 3, got {value}")


def plan_table(job: Job, cluster: Cluster, *, tensor_within_node: bool = True, **allowed: Any) -> Table:
    """Every plan of the job on all of the cluster's GPUs, whether it fits or not.

    Args:
        job, cluster: what and where.
        tensor_within_node: keep tp to divisors of a node's GPUs.
        **allowed: a value, or several, for any of `AXES`: ``tp=8``, ``zero_stage=(0,
            1)``.

    tp divides the heads, pp the layers (each stage holds as many), dp the batch.
    Micro-batches of up to 16 sequences, up to 12 virtual stages. What changes nothing
    is left out: ZeRO on one replica, schedules of a single stage, selective
    recomputation with flash attention.

    Sequences are split only where you ask for it, ``cp=(1, 2, 4)``; experts, where there
    are any, in every way. The layers of a `Decoder` needn't divide evenly: its stages
    may differ by one, and its ends may count as layers.
    """
    _check_axes(allowed)
    model, node = as_decoder(job.model), cluster.gpus_per_node
    modern, ranks = isinstance(job.model, Decoder), cluster.ranks
    shared = model.heads if model.latent else model.kv_heads
    tps = [
        t for t in _divisors(math.gcd(model.heads, shared, ranks)) if not tensor_within_node or node % t == 0
    ]
    tps = _allowed(allowed.get("tp"), tps)
    recompute = ["none", *(["selective"] if job.attention == "stored" else []), "full"]
    recompute = _allowed(allowed.get("recompute"), recompute)
    given = allowed.get("cp")
    blocks = []
    for t, c in itertools.product(tps, [1] if given is None else sorted({*_several(given)})):
        if ranks % (t * c) or (c > 1 and job.sequence % (2 * c)):
            continue
        split = [False, *([True] if t > 1 and job.sequence // c % t == 0 else [])]
        split = _allowed(allowed.get("sequence_parallel"), split)
        pps = _divisors(ranks // (t * c))
        for p, end in itertools.product(pps, (False, True) if modern else (False,)):
            even = model.layers % p == 0
            if p not in _allowed(allowed.get("pp"), [p]) or p > model.layers:
                continue
            if end not in _allowed(allowed.get("ends_as_layers"), [end]):
                continue
            layers, dp = model.layers + 2 * end, ranks // (t * c * p)
            if (end and (p == 1 or layers < 2 * p)) or job.batch % dp:
                continue
            if (even and end) or not (even or modern):  # nothing to mend, or no way to
                continue
            eps = [
                e
                for e in (_divisors(model.experts) if model.experts else [1])
                if dp * c % e == 0 and (e % c == 0 or c % e == 0)
            ]
            eps = _allowed(allowed.get("ep"), eps)
            mine = job.batch // dp
            zeros = [0, 1, 2, 3] if dp * c > 1 else [0]
            zeros = _allowed(allowed.get("zero_stage"), zeros)
            sizes = [b for b in _divisors(mine) if b <= LARGEST_MICRO_BATCH]
            sizes = _allowed(allowed.get("micro_batch"), sizes)
            dealt = layers // p if layers % p == 0 else 1
            pieces = [v for v in _divisors(dealt) if v <= LARGEST_VIRTUAL]
            plain = [(1, 1)] if p == 1 else [(0, 1), (1, 1)]
            virtual = [(2, v) for v in pieces if v > 1 and p > 1]
            names = _allowed(allowed.get("schedule"), SCHEDULES)
            vs = _allowed(allowed.get("virtual_stages"), pieces)
            for code, v in plain + virtual:
                if v not in vs or (p > 1 and SCHEDULES[code] not in names):
                    continue
                fit = [b for b in sizes if code != 2 or mine // b % p == 0]
                blocks += [
                    (dp, t, p, b, mine // b, z, code, v, RECOMPUTE.index(r), int(sp)) + (c, e, int(end))
                    for b in fit
                    for z in zeros
                    for r in recompute
                    for sp in split
                    for e in eps
                ]
    columns = np.array(blocks, dtype=np.int64).reshape(-1, len(Table._fields)).T
    return Table(*columns)


class NothingFits(ValueError):
    """No plan fits; `advice` holds the changes that would make one fit, in words."""

    def __init__(self, message: str, advice: Sequence[str] = ()) -> None:
        super().__init__("\n".join([message, *(f"  - {line}" for line in advice)]))
        self.advice = tuple(advice)


@dataclass(frozen=True)
class Ranking:
    """What `search` found: `best` holds predictions, fastest first.

    Attributes:
        job, cluster, constants: what was asked.
        best: the fastest plans.
        layouts: the fastest plan of each (dp, tp, pp, cp, ep), fastest first.
        considered, fitting: how many plans there were, and how many fit.
        table, found: all plans, and their costs.
    """

    job: Job
    cluster: Cluster
    constants: Constants
    best: tuple[Prediction, ...]
    layouts: tuple[Prediction, ...]
    considered: int
    fitting: int
    table: Table
    found: Costs

    @property
    def winner(self) -> Prediction:
        """The fastest plan that fits."""
        return self.best[0]

    def __repr__(self) -> str:
        return (
            f"Ranking({self.considered:,} plans, {self.fitting:,} fit; "
            f"fastest: {self.winner.plan}, {self.winner.seconds:.4g} s)"
        )

    def explain(self, losers: int = 3) -> str:
        """Why the winner wins, axis by axis, and what the next layouts lose."""
        return _explain(self, losers)


def _order(found: Costs, rows: np.ndarray, table: Table) -> np.ndarray:
    """`rows` by seconds; what is equal to half a percent by simplicity, then memory."""
    level = np.round(np.log(found.seconds[rows]) * 200)
    simple = table.zero_stage[rows] + 2 * (table.virtual_stages[rows] - 1)
    return rows[np.lexsort((found.seconds[rows], found.peak[rows], simple, level))]


def search(
    job: Job,
    cluster: Cluster,
    constants: Constants = CONSTANTS,
    *,
    keep: int = 10,
    **options: Any,
) -> Ranking:
    """Predict every plan, drop what doesn't fit, and rank the rest by the step's time.

    Args:
        job, cluster, constants: what, where, and how fast things are.
        keep: how many of the fastest are predicted in full.
        **options: as in `plan_table`.

    Raises: `NothingFits`, which says what would make it fit; ValueError if there is no
    plan at all.
    """
    check_count("keep", keep)
    table = plan_table(job, cluster, **options)
    if not len(table.dp):
        raise ValueError(_no_plan(job, cluster, options))
    found = costs(table, job, cluster, constants)
    usable = constants.usable * cluster.gpu.memory_bytes
    rows = np.flatnonzero(found.peak <= usable)
    if not len(rows):
        raise NothingFits(*_what_would_fit(job, cluster, constants, options, table, found))
    ranked = _order(found, rows, table)
    layouts = np.stack([table.tp, table.pp, table.cp, table.ep])[:, ranked]
    _, first = np.unique(layouts, axis=1, return_index=True)
    firsts = ranked[np.sort(first)]

    def full(rows: np.ndarray) -> tuple[Prediction, ...]:
        plans = [table.plan(int(i)) for i in rows]
        return tuple(predict(plan, job, cluster, constants) for plan in plans)

    best = full(ranked[:keep])
    counts = len(table.dp), len(rows)
    return Ranking(job, cluster, constants, best, full(firsts[:keep]), *counts, table, found)


def _no_plan(job: Job, cluster: Cluster, options: Mapping[str, Any]) -> str:
    usual = {"tensor_within_node": True}
    given = ", ".join(f"{k}={v!r}" for k, v in options.items() if v is not None and v != usual.get(k))
    why = (
        f"no plan: tp must divide the {job.model.heads} heads, pp the {job.model.layers} "
        f"layers, dp the batch of {job.batch}, and dp x tp x pp must be "
        f"{cluster.ranks} GPUs"
    )
    if options.get("cp") is not None:
        why = why.replace("dp x tp x pp", "dp x tp x pp x cp") + (
            f"; 2 x cp must divide the sequence, {job.sequence}"
        )
    if options.get("ep") is not None:
        count = as_decoder(job.model).experts
        rule = f"divide dp x cp and the {count} experts" if count else "be 1"
        why += f"; ep must {rule}{'' if count else ' for a model without experts'}"
    return f"{why}, with {given}" if given else why


def _least(found: Costs, rows: Any = slice(None)) -> float:
    return float(found.peak[rows].min())


def _what_would_fit(
    job: Job,
    cluster: Cluster,
    constants: Constants,
    options: Mapping[str, Any],
    table: Table,
    found: Costs,
) -> tuple[str, list[str]]:
    """A message and the changes, each tried alone, that make a plan fit."""
    usable = constants.usable * cluster.gpu.memory_bytes
    place = int(np.argmin(found.peak))
    message = (
        f"nothing fits: of {len(table.dp):,} plans the smallest needs "
        f"{_least(found) / 1e9:.1f} GB a GPU ({table.plan(place)}), and "
        f"{usable / 1e9:.1f} GB of {cluster.gpu.memory_bytes / 1e9:g} are usable. "
        "Each of these alone would make it fit:"
    )

    def least(job: Job, cluster: Cluster, options: Mapping[str, Any]) -> float | None:
        """The smallest peak; None if there is no plan or none fits."""
        rows = plan_table(job, cluster, **options)
        if not len(rows.dp):
            return None
        peak = _least(costs(rows, job, cluster, constants))
        return peak if peak <= constants.usable * cluster.gpu.memory_bytes else None

    advice = []
    for name, value in options.items():
        if value is None or (name == "tensor_within_node" and not value):
            continue
        rest = {k: v for k, v in options.items() if k != name}
        if (peak := least(job, cluster, rest)) is not None:
            advice.append(f"allow more than {name}={value!r}: {peak / 1e9:.1f} GB a GPU")
    if options.get("tensor_within_node", True):
        wide = {**options, "tensor_within_node": False}
        if (peak := least(job, cluster, wide)) is not None:
            advice.append(
                "let tensor parallelism cross nodes (tensor_within_node=False): "
                f"{peak / 1e9:.1f} GB, and slow"
            )
    if job.attention == "stored":
        if (peak := least(replace(job, attention="flash"), cluster, options)) is not None:
            advice.append(f"use flash attention: {peak / 1e9:.1f} GB a GPU")

    def sized(nodes: int) -> Cluster:
        return Cluster(
            nodes,
            cluster.gpus_per_node,
            cluster.gpu,
            cluster.intra,
            cluster.inter,
            cluster.efficiency,
        )

    for times in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512):
        more = sized(cluster.nodes * times)
        if (peak := least(job, more, options)) is not None:
            advice.append(f"{times} times the nodes, {more.ranks:,} GPUs: {peak / 1e9:.1f} GB a GPU")
            break
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes):
        if gpu.memory_bytes > cluster.gpu.memory_bytes:
            other = Cluster(cluster.nodes, cluster.gpus_per_node, gpu)
            if (peak := least(job, other, options)) is not None:
                advice.append(f"as many {gpu.name}, {gpu.memory_bytes / 1e9:g} GB each: {peak / 1e9:.1f} GB")
                break
    if isinstance(job.model, Decoder) and options.get("cp") is None:
        for ranks in (2, 4, 8, 16, 32, 64):
            asked = {**options, "cp": ranks}
            if (peak := least(job, cluster, asked)) is not None:
                advice.append(f"split sequences, cp={ranks}: {peak / 1e9:.1f} GB a GPU")
                break
    length = job.sequence
    while length > 256:
        length //= 2
        if (peak := least(replace(job, sequence=length), cluster, options)) is not None:
            advice.append(f"sequences of {length} tokens: {peak / 1e9:.1f} GB a GPU")
            break
    return message, advice or ["none found among nodes, GPUs, options and sequence length"]


def _difference(loser: Prediction, winner: Prediction) -> str:
    """The parts in which one step is longer, and shorter, in words."""
    gaps = {k: loser.parts.get(k, 0.0) - winner.parts.get(k, 0.0) for k in (*TIME_PARTS, *FURTHER_PARTS)}
    told = sorted(gaps.items(), key=lambda gap: -abs(gap[1]))
    threshold = 0.002 * winner.seconds
    words = [f"{gap:+.3g} s {name}" for name, gap in told if abs(gap) > threshold]
    return ", ".join(words[:4]) or "hardly any difference"


def _longer(loser: Prediction, winner: Prediction) -> str:
    gap = loser.seconds / winner.seconds - 1
    return "equal" if abs(gap) < 5e-4 else f"{gap:+.1%}"


def _explain(ranking: Ranking, losers: int) -> str:
    """The text of `Ranking.explain`."""
    best, table, found = ranking.winner, ranking.table, ranking.found
    plan, seconds = best.plan, best.seconds
    share = {k: v / seconds for k, v in best.parts.items()}
    spent = sorted((k for k in share if share[k] >= 0.005), key=lambda k: -share[k])
    fullest = max(range(plan.pp), key=lambda i: sum(best.memory[i].values()))
    held = {k: v for k, v in best.memory[fullest].items() if v > 0.005 * best.peak}
    lines = [
        f"{ranking.considered:,} plans, {ranking.fitting:,} fit. Predicted fastest: {plan}.",
        f"  {seconds:.4g} s a step, {best.tokens_per_second:,.0f} tokens/s, MFU {best.mfu:.1%}.",
        "  Time: " + ", ".join(f"{k} {share[k]:.1%}" for k in spent) + ".",
        f"  Memory, stage {fullest} of {plan.pp}: {best.peak / 1e9:.1f} of "
        f"{best.usable / 1e9:.1f} GB: " + ", ".join(f"{k} {v / 1e9:.1f}" for k, v in held.items()) + ".",
        *(
            ["  Links: " + ", ".join(f"{k} over {v}" for k, v in best.links.items()) + "."]
            if best.links
            else []
        ),
        "Axis by axis, the best plan that differs there:",
    ]
    fits = found.peak <= best.usable
    for name in AXES:
        column = getattr(table, name)
        own = getattr(plan, name)
        codes = {"schedule": SCHEDULES, "recompute": RECOMPUTE}.get(name)
        mine = codes.index(own) if codes else int(own)
        values = [int(v) for v in np.unique(column) if v != mine]
        if name == "virtual_stages" or not values:
            continue
        for value in sorted(values, key=lambda v: (abs(v - mine), v))[:2]:
            word = codes[value] if codes else bool(value) if isinstance(own, bool) else value
            rows = np.flatnonzero(column == value)
            good = rows[fits[rows]]
            label = f"  {name.replace('_', ' ')} {word}:"
            if len(good):
                i = int(_order(found, good, table)[0])
                other = predict(table.plan(i), ranking.job, ranking.cluster, ranking.constants)
                gap = _difference(other, best)
                lines.append(f"{label} {_longer(other, best)} ({gap}).")
            else:
                lines.append(f"{label} doesn't fit; it needs {_least(found, rows) / 1e9:.1f} GB or more.")
    others = [p for p in ranking.layouts if p.plan != plan][:losers]
    if others:
        lines.append("The next layouts:")
    for other in others:
        gap = _difference(other, best)
        lines.append(f"  {other.plan}: {_longer(other, best)} ({gap}).")
    return "\n".join(lines)


def step_bars(predictions: Sequence[Prediction], title: str | None = None) -> Any:
    """A picture of predicted steps, one bar a plan, stacked by what they are spent on.

    Returns: a `manyranks.show.Picture`.
    """
    rows = {str(found.plan): dict(found.parts) for found in predictions}
    if not rows:
        raise ValueError("predictions must hold one or more, got none")
    order = TIME_PARTS
    if any(set(parts) - set(TIME_PARTS) for parts in rows.values()):
        every = (*TIME_PARTS[:4], *FURTHER_PARTS, *TIME_PARTS[4:])
        sums = {k: sum(parts.get(k, 0) for parts in rows.values()) for k in every}
        kept = sorted((k for k in every if sums[k]), key=lambda k: -sums[k])
        few = kept if len(kept) <= 8 else kept[:7]  # as many as there are textures
        for parts in rows.values():
            left = sum(parts.pop(k) for k in list(parts) if k not in few)
            parts.update({"other": left} if len(kept) > 8 else {})
        order = [k for k in every if k in few] + ["other"] * (len(kept) > 8)
    return stacked_bars(rows, order, lambda t: f"{t:.4g} s", title)
