"""The class report: how the marks spread, which tests failed how often, and who needs a look."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from manyranks.grading.feedback import feedback_name
from manyranks.grading.lab import Plan
from manyranks.grading.marks import Mark
from manyranks.grading.pages import escape, number, page

__all__ = ["class_report"]


def _bars(title: str, rows: Sequence[tuple[str, int, str]], left: int) -> str:
    """Horizontal bars as SVG: (label, length, what stands at the bar's end). Text is text, colours are the page's."""
    most = max((n for _, n, _ in rows), default=0) or 1
    wide, line = 720, 24
    high = line * len(rows) + 8
    span = wide - left - 110
    parts = [
        f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(title)}</title>",
        f'<line class="axis" x1="{left}" y1="0" x2="{left}" y2="{high}"/>',
    ]
    for i, (label, length, end) in enumerate(rows):
        y = 4 + i * line
        bar = round(span * length / most, 1)
        shown = label if len(label) * 6.6 < left else label[: int(left / 6.6) - 1] + "…"
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(shown)}</text>')
        parts.append(f'<rect class="bar" x="{left}" y="{y + 3}" width="{bar}" height="{line - 8}"/>')
        parts.append(f'<text x="{left + bar + 6}" y="{y + 15}">{escape(end)}</text>')
    return "\n".join([*parts, "</svg>"])


def _spread(marks: Sequence[Mark]) -> str:
    """Ten classes of the marks in per cent."""
    counts = [0] * 10
    for mark in marks:
        counts[min(9, int(mark.mark / mark.out_of * 10))] += 1
    rows = []
    for i, n in enumerate(counts):
        rows.append((f"{i * 10}% to {'below ' if i < 9 else ''}{i * 10 + 10}%", n, str(n)))
    return _bars("How many students have which share of the points", rows, 140)


def class_report(marks: Sequence[Mark], plan: Plan, title: str, links: bool = True) -> str:
    """The report as one page. `links`: to the feedback pages in the folder feedback/."""
    graded = [m for m in marks if m.result.graded and m.result.kind != "missing"]
    missing = [m for m in marks if m.result.kind == "missing"]
    lines = [f"<h1>{escape(title)}: class report</h1>"]
    summary = f"{len(graded)} submissions graded, {len(missing)} missing."
    if graded:
        values = [m.mark for m in graded]
        summary += (
            f" Out of {number(plan.points)}: median {number(statistics.median(values))}, mean "
            f"{number(statistics.mean(values))}, lowest {number(min(values))}, highest {number(max(values))}."
        )
    lines.append(f"<p>{summary}</p>")
    if graded:
        lines += ["<h2>Marks</h2>", '<div class="scroll">', _spread(graded), "</div>"]
    ran = [m for m in graded if not m.result.problem]
    failures = []
    for test in plan.tests:
        n = sum(1 for m in ran for o in m.result.outcomes if o.name == test.name and not o.passed)
        failures.append((test, n))
    order = sorted(failures, key=lambda pair: -pair[1])
    if ran:
        rows = [(t.short, n, f"{n} ({n / len(ran):.0%})") for t, n in order]
        lines += [
            "<h2>Failed tests</h2>",
            f"<p>Of the {len(ran)} submissions that could be run, so many failed each test.</p>",
            '<div class="scroll">',
            _bars("How many submissions failed each test", rows, 360),
            "</div>",
            '<div class="scroll"><table><caption>The same in numbers</caption>',
            '<tr><th scope="col">Test</th><th scope="col">What it tests</th><th scope="col" class="number">Points</th>'
            '<th scope="col" class="number">Failed</th></tr>',
        ]
        for test, n in order:
            lines.append(
                f'<tr><th scope="row">{escape(test.short)}</th><td>{escape(test.doc)}</td>'
                f'<td class="number">{number(test.points)}</td><td class="number">{n}</td></tr>'
            )
        lines.append("</table></div>")
    look = [m for m in marks if m.result.problem or m.result.notes or any(o.fault for o in m.result.outcomes)]
    if look:
        lines.append("<h2>To look at</h2><ul>")
        for m in look:
            faults = sorted({o.fault for o in m.result.outcomes if o.fault and o.fault != m.result.kind})
            said = [m.result.problem, *m.result.notes] if m.result.problem or m.result.notes else []
            if faults:
                said.append(f"Ended by the sandbox: {', '.join(faults)}.")
            lines.append(
                f"<li><strong>{escape(m.result.student)}</strong>: {escape(' '.join(filter(None, said)))}</li>"
            )
        lines.append("</ul>")
    twins: dict[str, list[str]] = {}
    for m in ran:
        if m.result.file:
            twins.setdefault(m.result.file, []).append(m.result.student)
    same = [names for names in twins.values() if len(names) > 1]
    if same:
        lines.append("<h2>Identical files</h2><p>Byte for byte the same lab.py:</p><ul>")
        lines += [f"<li>{escape(', '.join(names))}</li>" for names in same]
        lines.append("</ul>")
    lines += [
        "<h2>Everybody</h2>",
        '<div class="scroll"><table><caption>Marks, sorted by name</caption>',
        '<tr><th scope="col">Student</th><th scope="col">Status</th><th scope="col" class="number">Mark</th></tr>',
    ]
    for m in marks:
        name = escape(m.result.student)
        name = f'<a href="feedback/{feedback_name(m)}">{name}</a>' if links else name
        mark = number(m.mark) if m.result.graded else "none"
        lines.append(
            f'<tr><th scope="row">{name}</th><td>{escape(m.status)}</td><td class="number">{mark}</td></tr>'
        )
    lines.append("</table></div>")
    return page(f"{title}: class report", "\n".join(lines))
