"""Static checks of every chapter notebook, and of what is tracked in git.

nbval re-runs the notebooks (`make test`); these checks see what nbval lets pass: stored errors, cells that were never
run, failing shell commands, pictures without a description, names and paths of the machine that ran them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tools import export, refresh, student

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(
    [*ROOT.glob("chapters/*.ipynb"), *ROOT.glob("book/**/*.ipynb"), *ROOT.glob("labs/**/*.ipynb")]
)
NOTEBOOKS = [path for path in NOTEBOOKS if ".ipynb_checkpoints" not in path.parts]
CHAPTERS = export.chapters(ROOT)

TAGS = {
    "export": "the cell is part of the generated module",
    **{f"export-{module}": "the same, in a chapter of several modules" for module in export.ORDER},
    "exercise": "an exercise's text or start",
    "solution": "left out of student copies",
    "gpu": "more than a CPU run when GPUs are there",
    "hide-input": "the page folds the code",
    "hide-output": "the page folds the output",
    "remove-cell": "the page leaves the cell out",
    "remove-output": "the page leaves the output out",
    "nbval-ignore-output": "what truly varies: run, not compared",
    "nbval-skip": "not run by nbval",
    "raises-exception": "the error is the point",
}
RASTER = ("image/png", "image/jpeg", "image/gif")
DRAWING = re.compile(r"<(?:svg|img)\b[^>]*>")
DESCRIBED = re.compile(r"""\b(?:aria-label|alt)=["'][^"']{3}|\baria-hidden=["']true""")
MAGICS = {"capture", "config", "matplotlib", "pip", "time", "timeit"}
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
PROCESS = re.compile(r"\bpid\W{0,3}\d+", re.I)
MACHINE_PATH = re.compile(r"(?<![\w.\]}])/(?:root|home|tmp|Users)/\w|[A-Z]:\\Users\\|\bipykernel_\d+")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b")
PACKAGE_HOST = re.compile(
    r"https?://\S+/simple\b"  # a package index
    + r"|https?://\S+\.(?:whl|tgz)\b"
    + r'|"resolved":\s*"http'  # a lock file with addresses
    + r"|^\s*(?:--(?:extra-)?index-url|--find-links|-f\s+\S+://)",
    re.M,
)
# Files that name a folder of every machine, not of this one, and why they must.
MAY_NAME_PATHS: dict[str, str] = {
    "manyranks/grading/": "the sandbox lays out its own folders",
    "tests/grading/": "hostile submissions try to reach such folders",
}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(nb: nbformat.NotebookNode) -> list[tuple[str, nbformat.NotebookNode]]:
    cells = [cell for cell in nb.cells if cell.cell_type == "code"]
    return [(f"code cell {number} (id {cell.get('id')})", cell) for number, cell in enumerate(cells, 1)]


def tags(cell: nbformat.NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def text_of(output: nbformat.NotebookNode) -> str:
    """What a reader can read in an output."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return output.evalue
    return "\n".join(value for mime, value in output.data.items() if mime.startswith("text/"))


def tracked_files() -> list[Path]:
    """The files in git, with new ones that git doesn't ignore; none outside a checkout."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True
    )
    files = [ROOT / name for name in done.stdout.decode().split("\0") if name]
    return [path for path in files if path.is_file()]


def tracked_text() -> list[tuple[str, str]]:
    texts = []
    for path in tracked_files():
        try:
            texts.append((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue  # a picture
    return texts


# ------------------------------------------------------------------------------------------------ every notebook


@each_notebook
def test_stored_as_refresh_stores(path):
    """The file is in the form of tools/refresh.py, so that the next refresh shows real changes only."""
    text = path.read_text(encoding="utf-8")
    nb = nbformat.reads(text, as_version=4)
    nbformat.validate(nb)
    assert nbformat.writes(refresh.normalise(nb)) + "\n" == text, "run `make refresh`"


@each_notebook
def test_ran_from_top_to_bottom(path):
    counts = [cell.execution_count for _, cell in code_cells(read(path))]
    assert counts == list(range(1, len(counts) + 1)), "a cell is empty, was not run, or ran out of order"


@each_notebook
def test_no_error_is_stored(path):
    errors = [
        f"{where}: {output.ename}: {output.evalue}"
        for where, cell in code_cells(read(path))
        for output in cell.outputs
        if output.output_type == "error" and "raises-exception" not in tags(cell)
    ]
    assert not errors


@each_notebook
def test_no_widget_state_is_stored(path):
    nb = read(path)
    assert "widgets" not in nb.metadata
    assert "jupyter.widget" not in path.read_text(encoding="utf-8")


@each_notebook
def test_tags_are_known(path):
    unknown = {tag for cell in read(path).cells for tag in tags(cell)} - set(TAGS)
    assert not unknown, f"add them to TAGS, or correct them: {sorted(unknown)}"


@each_notebook
def test_cells_are_python_with_known_magics(path):
    """nbval lets a failing `!pip` and a misspelt `%magic` pass, so neither shell lines nor unknown magics are used."""
    problems = []
    for where, cell in code_cells(read(path)):
        plain = TransformerManager().transform_cell(cell.source)
        try:
            calls = [node for node in ast.walk(ast.parse(plain)) if isinstance(node, ast.Call)]
        except SyntaxError as error:
            problems.append(f"{where}: {error}")
            continue
        for call in calls:
            done = ast.unparse(call.func)
            if done in ("get_ipython().system", "get_ipython().getoutput"):
                problems.append(f"{where}: a shell line; its failure would pass unseen")
            elif done in ("get_ipython().run_line_magic", "get_ipython().run_cell_magic"):
                if call.args[0].value not in MAGICS:
                    problems.append(f"{where}: %{call.args[0].value}")
    assert not problems


@each_notebook
def test_pictures_are_svg_and_described(path):
    """`manyranks.show.picture` and `explore` describe what they draw; else {"mystnb": {"image": {"alt": "..."}}}."""
    problems = []
    for where, cell in code_cells(read(path)):
        mystnb = cell.metadata.get("mystnb", {})
        described = mystnb.get("image", {}).get("alt") or mystnb.get("figure", {}).get("alt")
        for output in cell.outputs:
            data = output.get("data", {})
            if any(mime in data for mime in RASTER):
                problems.append(f"{where}: a picture that nbval can't compare; show SVG")
            elements = DRAWING.findall(data.get("text/html", ""))
            if not described:
                elements += DRAWING.findall(data.get("image/svg+xml", ""))[:1]
            problems += [
                f"{where}: no description: {tag[:60]}" for tag in elements if not DESCRIBED.search(tag)
            ]
    assert not problems


@each_notebook
def test_outputs_hold_nothing_of_the_machine(path):
    """Compared outputs hold no addresses or process ids, and no output holds a path of the machine."""
    problems = []
    for where, cell in code_cells(read(path)):
        text = "\n".join(text_of(output) for output in cell.outputs)
        patterns = [MACHINE_PATH]
        if not tags(cell) & {"nbval-ignore-output", "nbval-skip"}:
            patterns += [ADDRESS, PROCESS]
        problems += [f"{where}: {match[0]}" for pattern in patterns for match in pattern.finditer(text)]
    assert not problems


@each_notebook
def test_local_links_and_images_exist(path):
    problems = []
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            problems += broken_links(cell.source, path.parent)
    assert not problems


# ------------------------------------------------------------------------------------------------ every chapter


@each_chapter
def test_generated_module_is_current(path, capsys):
    exported = any(export.is_exported(tags(cell)) for cell in read(path).cells)
    if not exported:
        pytest.skip("the chapter exports nothing")
    status = export.main(["--check", path.stem])
    assert status == 0, capsys.readouterr().err


def test_no_generated_module_without_its_chapter():
    assert not export.orphans(ROOT)


@each_chapter
def test_exported_definitions_are_documented_and_typed(path):
    """ruff's rules: D1 a docstring for every public definition, ANN a type for every argument and result."""
    source = "\n\n\n".join(text for _, text in export.exported_cells(path))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--isolated",
            "--select=ANN,D1",
            "--ignore=ANN401,D100,D105,D107",
        ]
        + ["--output-format=concise", "--stdin-filename=exported.py", "-"],
        input=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@each_chapter
def test_student_copy_holds_no_solution(path):
    nb = read(path)
    copied = student.strip(nb)
    assert not any("solution" in tags(cell) for cell in copied.cells)
    if any("solution" in tags(cell) for cell in nb.cells):
        assert any("exercise" in tags(cell) for cell in copied.cells), "a solution without an exercise"
    assert not any(cell.get("outputs") for cell in copied.cells)


@each_chapter
def test_exported_cells_hold_no_solution(path):
    both = [
        where
        for where, cell in code_cells(read(path))
        if "solution" in tags(cell) and export.is_exported(tags(cell))
    ]
    assert not both, "a module would show the solution"


# ------------------------------------------------------------------------------------------------ every tracked file

LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")


def broken_links(markdown: str, folder: Path) -> list[str]:
    """Relative links in `markdown` whose target doesn't exist below `folder`."""
    markdown = re.sub(r"```.*?```|`[^`\n]*`", "", markdown, flags=re.S)  # code
    broken = []
    for match in LINK.finditer(markdown):
        target = (match[1] or match[2]).split("#")[0]
        if not target or re.match(r"[a-z][a-z0-9+.-]*:|//", target):
            continue
        place = ROOT / target.lstrip("/") if target.startswith("/") else folder / target
        if not place.exists() and not any(place.with_suffix(s).exists() for s in (".md", ".ipynb")):
            broken.append(target)
    return broken


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    assert not broken_links((ROOT / name).read_text(encoding="utf-8"), ROOT)


def test_no_file_names_a_package_host():
    found = [f"{name}: {m[0].strip()}" for name, text in tracked_text() for m in PACKAGE_HOST.finditer(text)]
    assert not found


def test_no_file_holds_a_path_of_one_machine():
    checkout = str(ROOT) if len(ROOT.parts) > 2 else None
    problems = []
    for name, text in tracked_text():
        if name.startswith(tuple(MAY_NAME_PATHS)):
            continue
        problems += [f"{name}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
        if checkout and checkout in text:
            problems.append(f"{name}: {checkout}")
    assert not problems


def test_nothing_is_left_unfinished():
    found = [f"{name}: {match[0]}" for name, text in tracked_text() for match in UNFINISHED.finditer(text)]
    assert not found


# ------------------------------------------------------------------------------------------------ pinned packages


def requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [line.split("#")[0].strip() for line in lines]
    return [line for line in found if line and line != "-e ."]


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_every_requirement_is_pinned():
    pinned = requirements("requirements.txt")
    assert all(re.match(r"[\w.-]+==[\w.!+-]+(\s*;.*)?$", line) for line in pinned)
    missing = {canonical(line) for line in requirements("requirements.in")} - {
        canonical(line) for line in pinned
    }
    assert not missing, "run `make lock`"


def test_cuda_is_left_to_pip():
    """A machine without a GPU must not be made to install CUDA's packages."""
    names = {canonical(line) for line in requirements("requirements.txt")}
    assert not {name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))}
