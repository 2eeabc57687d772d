"""Run chapter notebooks from top to bottom and store their outputs in a stable form.

    python tools/refresh.py                # every chapter
    python tools/refresh.py 02_collectives # one chapter, by name or path

Each notebook runs in a fresh kernel, in its own folder, as a reader would run it. A notebook that raises is left as it
was, and the script says where it failed. What is stored:

* text and pictures as the cells gave them, streams joined, progress bars reduced to their last state;
* execution counts 1 to n;
* no widget state and no widget models (a page's widgets are made when the book is built; what stays is the picture
  that `explore` shows where widgets can't be shown);
* no timings, no kernel version, no editor settings; tags sorted, JSON keys sorted, cell ids kept;
* SVG without its date, with ids that depend on the drawing only.

So a second run changes nothing but the outputs of cells tagged `nbval-ignore-output`, and the difference in git shows
what really changed.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(ROOT))

from tools.export import goes_by  # noqa: E402

CELL_TIMEOUT = 120  # seconds; the same limit that `make test` gives nbval
BUDGET = 60  # seconds for one chapter on two cores

NOTEBOOK_METADATA = {"manyranks", "mystnb"}
CELL_METADATA = {"tags", "mystnb", "jupyter"}
WIDGET_TYPES = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json")
SVG = "image/svg+xml"
# Matplotlib's ids for markers, clips, hatches and collections: a prefix and ten hexadecimal digits.
SVG_ID = re.compile(r'\bid="(\w*?)([0-9a-f]{10})"')


class RefreshError(Exception):
    """A notebook that can't be stored; the message says which cell and why."""


def normalise(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy of an executed notebook in the form that is stored.

    Raises RefreshError for an error output in a cell that isn't tagged `raises-exception`.
    """
    nb = copy.deepcopy(nb)
    nb.nbformat, nb.nbformat_minor = 4, 5
    kept = {key: value for key, value in nb.metadata.items() if key in NOTEBOOK_METADATA}
    nb.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            **kept,
        }
    )
    count, ids = 0, set()
    for position, cell in enumerate(nb.cells):
        cell.metadata = nbformat.from_dict(
            {k: v for k, v in cell.metadata.items() if k in CELL_METADATA and v}
        )
        if "tags" in cell.metadata:
            cell.metadata.tags = sorted(set(cell.metadata.tags))
        cell.id = _stable_id(cell, ids)
        cell.source = cell.source.rstrip("\n")
        if cell.cell_type != "code":
            continue
        if cell.source.strip():
            count += 1
            cell.execution_count = count
        else:
            cell.execution_count, cell.outputs = None, []
        cell.outputs = [_normalise_output(output, cell, position) for output in cell.outputs]
    return nb


def _stable_id(cell: nbformat.NotebookNode, taken: set[str]) -> str:
    """The cell's id; one that hangs on its text if it has none, or if an earlier cell has the same."""
    name, salt = cell.get("id"), 0
    while not name or name in taken:
        name = hashlib.sha256(f"{cell.source}\0{salt}".encode()).hexdigest()[:8]
        salt += 1
    taken.add(name)
    return name


def _normalise_output(
    output: nbformat.NotebookNode, cell: nbformat.NotebookNode, position: int
) -> nbformat.NotebookNode:
    if output.output_type == "error":
        if "raises-exception" not in cell.metadata.get("tags", []):
            raise RefreshError(f"cell {position} (id {cell.id}) raised {output.ename}: {output.evalue}")
        output.traceback = [f"{output.ename}: {output.evalue}"]  # the full one holds paths and colours
    elif output.output_type in ("display_data", "execute_result"):
        for mime in WIDGET_TYPES:
            output.data.pop(mime, None)
        if SVG in output.data:
            output.data[SVG] = normalise_svg("".join(output.data[SVG]))
        output.metadata = nbformat.from_dict({k: v for k, v in output.metadata.items() if k in output.data})
        if output.output_type == "execute_result":
            output.execution_count = cell.execution_count
    return output


def normalise_svg(svg: str) -> str:
    """The drawing without its metadata block (it holds the date) and with ids made from the drawing itself.

    The ids stay apart between different drawings, since a page may hold several of them.
    """
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    found = list(dict.fromkeys(SVG_ID.findall(svg)))
    if not found:
        return svg
    for number, (prefix, digits) in enumerate(found):
        svg = re.sub(rf'(\bid="|#){prefix}{digits}\b', rf"\g<1>{prefix}@{number}@", svg)
    drawing = hashlib.sha256(svg.encode()).hexdigest()[:7]
    return re.sub(r"@(\d+)@", lambda match: f"{drawing}{int(match[1]):03x}", svg)


def execute(nb: nbformat.NotebookNode, folder: Path, label: str = "") -> nbformat.NotebookNode:
    """A copy of `nb` executed in a fresh kernel in `folder`; raises RefreshError with the cell's traceback."""
    nb = copy.deepcopy(nb)
    code = sum(1 for cell in nb.cells if cell.cell_type == "code" and cell.source.strip())
    with tqdm(total=code, desc=label, unit="cell", disable=None, leave=False) as bar:
        client = NotebookClient(
            nb,
            timeout=CELL_TIMEOUT,
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(folder)}},
            store_widget_state=False,
            record_timing=False,
            coalesce_streams=True,
            on_cell_executed=lambda **_: bar.update(),
        )
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise RefreshError(str(error).strip()) from None
    return nb


def refresh(path: Path) -> bool:
    """Run and store one notebook; returns whether the file changed."""
    before = path.read_text(encoding="utf-8")
    nb = normalise(execute(nbformat.reads(before, as_version=4), path.parent, path.stem))
    nbformat.validate(nb)
    after = nbformat.writes(nb) + "\n"
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def find(names: list[str], root: Path = ROOT) -> list[Path]:
    """The notebooks named, or all chapters; raises RefreshError for a name that fits none."""
    chapters = sorted((root / "chapters").glob("*.ipynb"))
    if not names:
        return chapters
    found = []
    for name in names:
        if Path(name).suffix == ".ipynb" and Path(name).is_file():
            found.append(Path(name).resolve())
        elif matches := [path for path in chapters if goes_by(path, name)]:
            found += matches
        else:
            raise RefreshError(f"no notebook named {name}")
    return found


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run the chapters and store their outputs in a stable form.")
    parser.add_argument("names", nargs="*", help="notebooks, by path, name or number (default: all chapters)")
    args = parser.parse_args(argv)
    try:
        notebooks = find(args.names, root)
    except RefreshError as error:
        parser.error(str(error))

    failed = 0
    for path in notebooks:
        start = time.perf_counter()
        try:
            changed = refresh(path)
        except RefreshError as error:
            print(f"{path.name}: left as it was\n{error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        seconds = time.perf_counter() - start
        note = f" (over the {BUDGET} s that a chapter may take)" if seconds > BUDGET else ""
        print(f"{path.name}: {'stored' if changed else 'unchanged'}, {seconds:.1f} s{note}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
