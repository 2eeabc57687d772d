"""Put recorded figures into book/clusters.md, between its markers.

    python tools/clusters_page.py            # write them
    python tools/clusters_page.py --check    # fail if the page shows others

The figures come from `results/`: ``sudo python -m manyranks.bench.two_hosts --record`` and
``python -m manyranks.bench all_reduce --ranks 2 --record`` write them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyranks.bench import collectives, two_hosts
from manyranks.results import recorded
from manyranks.runtime import human_seconds

PAGE = Path(__file__).resolve().parent.parent / "book" / "clusters.md"


def _measured_on(entry: dict[str, Any]) -> str:
    here = entry["machine"]
    return f"Measured on {entry['date']}: {entry['world']}; {here['summary']}, {here['os']}, PyTorch {here['torch']}"


def sections() -> dict[str, str]:
    """The text between the markers, by the markers' names."""
    found = {}
    for entry in recorded("two_hosts"):
        made = two_hosts.tables(entry)
        note = (
            f"{_measured_on(entry)}, {entry['ranks']} processes. Latency, measured with 8 bytes: "
            f"{human_seconds(entry['alpha'])}. Of several repetitions the best counts."
        )
        if entry.get("load", 0) >= 1:
            note += (
                f" Other programs ran at the same time, on average {entry['load']:.0f} on "
                f"{entry['machine']['cores']} cores: expect better ratios on a quiet machine."
            )
        found["two_hosts.all_reduce"] = f"{note}\n\n{made['all_reduce']}"
        found["two_hosts.two_a_host"] = made["two_a_host"]
        found["two_hosts.wall"] = made["wall"]
    for entry in recorded("bench_all_reduce"):
        if entry["world"] != "2 processes, gloo on CPU":
            continue
        lines = [*collectives.HEADER, *map(collectives.row_text, entry["rows"])]
        lines.append(f"# Avg bus bandwidth    : {entry['average_busbw']:g}")
        table = "\n".join(line.rstrip() for line in lines)
        found["all_reduce"] = f"{_measured_on(entry)}.\n\n```text\n{table}\n```"
    return found


def filled(text: str) -> str:
    """The page with every section between its markers; ValueError for a section without markers."""
    for name, body in sections().items():
        start, end = f"<!-- recorded: {name} -->", "<!-- end -->"
        pattern = re.compile(f"({re.escape(start)}\n).*?({re.escape(end)})", re.DOTALL)
        text, count = pattern.subn(lambda m, body=body: f"{m[1]}\n{body}\n\n{m[2]}", text)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} sections marked {start}, not one")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    options = parser.parse_args(argv)
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before)
    if options.check and after != before:
        print(
            f"{PAGE.name} shows other figures than results/; run: python tools/clusters_page.py",
            file=sys.stderr,
        )
        return 1
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
