"""Run the chapters' hardware programs on this machine and keep the figures in `results/`.

    python tools/record.py                      # everything, on the GPUs if there are any, otherwise on CPU
    python tools/record.py 02 --ranks 4         # one chapter
    python tools/record.py --device cpu

A program is launched, its figures are written with the machine, the versions and the date, and the chapter's cells
show them the next time they run (`make refresh`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from manyranks import collectives, launch
from manyranks.results import record


def chapter_02(ranks: int, device: str) -> None:
    """All-reduce over message sizes: our ring, and the backend's own."""
    lengths = [4**k for k in range(4, 12)]
    buffer = np.ones(max(lengths), dtype=np.float32)
    seconds = {}
    for algorithm in ("ours", "auto"):
        run = launch(
            collectives.all_reduce_sweep, ranks=ranks, device=device, timeout=300.0, buffer=buffer, lengths=lengths,
            repeats=21, algorithm=algorithm,
        )  # fmt: skip
        seconds[algorithm] = collectives.quickest(run.results).tolist()
    print(record("02_all_reduce_sweep", run.world, ranks=ranks, sizes=[4 * n for n in lengths], seconds=seconds).name)


CHAPTERS: dict[str, Callable[[int, str], None]] = {"02": chapter_02}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapters", nargs="*", choices=[*CHAPTERS, []], help="chapter numbers; all without any")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args()
    for chapter in options.chapters or CHAPTERS:
        CHAPTERS[chapter](options.ranks, options.device)


if __name__ == "__main__":
    main()
