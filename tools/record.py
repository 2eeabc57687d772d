"""Run the chapters' hardware programs on this machine and keep the figures in `results/`.

    python tools/record.py                      # everything, on the GPUs if there are any, otherwise on CPU
    python tools/record.py 02 --ranks 4         # one chapter
    python tools/record.py beyond_1 beyond_2
    python tools/record.py --device cpu

The programs are in `manyranks.bench.chapters`, and `python -m manyranks.bench 02_all_reduce_sweep --record` runs one of
them, under torchrun and across machines too. The figures are written with the machine, the versions and the date, and
the chapters' cells show them the next time they run (`make refresh`).
"""

from __future__ import annotations

import argparse
import re

from manyranks.bench.chapters import CHAPTERS
from manyranks.bench.cli import chapter
from manyranks.results import record

NAMES = {re.match(r"(beyond_)?\d+", name)[0]: name for name in CHAPTERS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", choices=[*NAMES, []], help="chapter numbers; all without any")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args()
    for number in options.chapters or NAMES:
        found = chapter(NAMES[number], options.ranks, options.device)
        print(record(NAMES[number], found.pop("world"), **found).name)


if __name__ == "__main__":
    main()
