"""Make student copies of the chapters: the exercises without their solutions.

    python tools/student.py                    # every chapter, into _build/student/
    python tools/student.py 02_collectives     # one chapter, by name, number or path
    python tools/student.py --output handout   # elsewhere

What goes: cells tagged `solution`, and everything from a `{solution-start}` directive of sphinx-exercise to its
`{solution-end}`, across cells. Exercises, hints and checks stay. All stored outputs go too, since a check's output
tells the answer. A copy in which a solution still stands is an error, and is not written.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(ROOT))

from tools.refresh import RefreshError, find  # noqa: E402

OUTPUT = Path("_build") / "student"
# A gate of sphinx-exercise: a directive that opens or closes a solution that spans cells.
GATE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})\{solution-(?P<side>start|end)\}[^\n]*\n(?:.*?\n)??(?P=fence)[ \t]*$",
    re.M | re.S,
)
# A heading or directive that announces a solution, in a cell that carries no `solution` tag.
ANNOUNCED = re.compile(
    r"^\s*(?:#+\s*solution\b|(?::{3,}|`{3,})\s*\{[^}]*\}\s*solution\b|\S*\{solution)", re.I | re.M
)


class LeakError(Exception):
    """A student copy that would show a solution."""


def strip(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy of `nb` without solutions and without outputs; raises LeakError if solution text is left."""
    nb = copy.deepcopy(nb)
    kept, solutions, inside = [], [], False
    for position, cell in enumerate(nb.cells):
        removed = ""
        if cell.cell_type == "markdown":
            cell.source, removed, inside = _outside_gates(cell.source, inside, position)
        if "solution" in cell.metadata.get("tags", []) or (inside and cell.cell_type != "markdown"):
            solutions.append(cell.source)
            continue
        if removed:
            solutions.append(removed)
            if not cell.source:
                continue
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        kept.append(cell)
    if inside:
        raise LeakError("a {solution-start} has no {solution-end}")
    nb.cells = kept
    check(nb, solutions)
    return nb


def _outside_gates(source: str, inside: bool, position: int) -> tuple[str, str, bool]:
    """Divide a text cell into what stands outside and inside of solution gates, and say how it ends."""
    kept, removed, start = [], [], 0
    for gate in GATE.finditer(source):
        if (gate["side"] == "start") == inside:
            raise LeakError(f"cell {position}: {{solution-{gate['side']}}} without its counterpart")
        (removed if inside else kept).append(source[start : gate.start()].strip())
        inside, start = not inside, gate.end()
    (removed if inside else kept).append(source[start:].strip())
    return "\n\n".join(filter(None, kept)), "\n".join(filter(None, removed)), inside


def check(nb: nbformat.NotebookNode, solutions: list[str]) -> None:
    """Raise LeakError if a cell of `nb` announces a solution or holds the whole text of one."""
    for position, cell in enumerate(nb.cells):
        if ANNOUNCED.search(cell.source):
            raise LeakError(
                f"cell {position} (id {cell.get('id', '?')}) announces a solution; tag it `solution`"
            )
    kept = "\n".join(cell.source for cell in nb.cells)
    for solution in solutions:
        lines = [line.strip() for line in solution.splitlines() if len(line.strip()) > 20]
        if lines and all(line in kept for line in lines):
            raise LeakError(f"a solution stands in a cell without the tag too: {lines[0]}")


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make student copies of the chapters, without solutions.")
    parser.add_argument("names", nargs="*", help="notebooks, by path, name or number (default: all chapters)")
    parser.add_argument("--output", type=Path, default=root / OUTPUT, help="folder (default: _build/student)")
    args = parser.parse_args(argv)
    try:
        notebooks = find(args.names, root)
    except RefreshError as error:
        parser.error(str(error))

    failed = 0
    args.output.mkdir(parents=True, exist_ok=True)
    for path in notebooks:
        nb = nbformat.read(path, as_version=4)
        target = args.output / path.name
        try:
            copied = strip(nb)
        except LeakError as error:
            target.unlink(missing_ok=True)
            print(f"{path.name}: {error}", file=sys.stderr)
            failed += 1
            continue
        nbformat.write(copied, target)
        print(f"{path.name}: {len(nb.cells) - len(copied.cells)} of {len(nb.cells)} cells left out")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
