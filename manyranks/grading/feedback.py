"""A page for each student: the mark, how it came about, and for each failed test what was expected and what came."""

from __future__ import annotations

import hashlib
import re

from manyranks.grading.batch import Outcome
from manyranks.grading.lab import Plan
from manyranks.grading.marks import Mark, tidy
from manyranks.grading.pages import escape, number, page

__all__ = ["feedback_name", "feedback_page"]

SHOWN_OUTPUT = 12_000


def feedback_name(mark: Mark) -> str:
    """A file name that is safe everywhere, and different for different students."""
    who = f"{mark.result.student}\0{mark.result.id}"
    slug = re.sub(r"[^A-Za-z0-9]+", "-", mark.result.student).strip("-")[:40] or "student"
    return f"{slug}-{hashlib.sha256(who.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}.html"


def _test(outcome: Outcome, doc: str, public: bool) -> str:
    state = "passed" if outcome.passed else "failed"
    got = outcome.points if outcome.passed else 0
    parts = [
        f'<section class="test {state}-test">',
        f'<h3><span class="{state}">{state.capitalize()}</span>: {escape(outcome.short)} '
        f"({number(got)} of {number(outcome.points)} points)</h3>",
        f"<p>{escape(doc)}</p>" if doc else "",
    ]
    if not outcome.passed:
        parts.append(f"<pre>{escape(outcome.message)}</pre>")
        if outcome.where:
            parts.append(f"<p>In your code:</p><pre>{escape(outcome.where)}</pre>")
        if public:
            file, _, name = outcome.name.partition("::")
            parts.append(f"<p>Run it yourself: <code>pytest {escape(file)} -k {escape(name)} -v</code></p>")
        else:
            parts.append("<p>This test is only run when the lab is graded.</p>")
    if outcome.output:
        shown = escape(outcome.output[:SHOWN_OUTPUT])
        parts.append(f"<details><summary>What your code printed</summary><pre>{shown}</pre></details>")
    parts.append("</section>")
    return "\n".join(p for p in parts if p)


def feedback_page(mark: Mark, plan: Plan, title: str) -> str:
    """The page as text. Every string that a student could have made is escaped."""
    result = mark.result
    passed = sum(o.passed for o in result.outcomes)
    lines = [f"<h1>{escape(title)}</h1>", f"<p>{escape(result.student)}</p>"]
    if result.graded:
        lines.append(f'<p class="big">Mark: {number(mark.mark)} of {number(mark.out_of)}</p>')
        sentence = f"{passed} of {len(result.outcomes)} tests passed, for {number(result.points)} points."
        if mark.factor < 1:
            off = number(tidy((1 - mark.factor) * 100))
            sentence += f" Handed in {number(mark.seconds_late / 3600)} hours late: {off}% was taken off."
        lines.append(f"<p>{sentence}</p>")
    else:
        lines.append('<p class="big">Not graded yet</p>')
    if result.problem:
        lines.append(f"<p><strong>{escape(result.problem)}</strong></p>")
    if result.notes:
        lines.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in result.notes) + "</ul>")
    if not result.problem:
        known = {test.name: test for test in plan.tests}
        failed = [o for o in result.outcomes if not o.passed]
        good = [o for o in result.outcomes if o.passed]
        for heading, some in (("To look at", failed), ("Passed", good)):
            if some:
                lines.append(f"<h2>{heading}</h2>")
                lines += [_test(o, known[o.name].doc, known[o.name].public) for o in some]
    if result.file:
        lines.append(f"<p>Graded: lab.py with SHA-256 <code>{result.file[:16]}…</code></p>")
    return page(f"{title}: {result.student}", "\n".join(lines))
