"""The project's own tools, tried on a little chapter."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval import plugin as nbval

from tools import export, refresh, student

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests" / "fixtures" / "little_chapter.ipynb"


@pytest.fixture
def book(tmp_path):
    """A repository with one chapter, the second."""
    (tmp_path / "chapters").mkdir()
    shutil.copy(FIXTURE, tmp_path / "chapters" / "02_little.ipynb")
    return tmp_path


def edit(book, change):
    path = book / "chapters" / "02_little.ipynb"
    nb = nbformat.read(path, as_version=4)
    change(nb)
    nbformat.write(nb, path)


def exported(source):
    return new_code_cell(source, metadata={"tags": ["export"]})


# ------------------------------------------------------------------------------------------------ export


def test_export_writes_a_module(book):
    assert export.main([], book) == 0
    text = (book / "manyranks" / "collectives.py").read_text(encoding="utf-8")
    assert "Generated from chapters/02_little.ipynb" in text.splitlines()[0]
    tree = ast.parse(text)
    assert ast.get_docstring(tree) == "What the little chapter builds.\n\nA second paragraph."

    namespace: dict = {"__name__": "collectives"}
    exec(compile(text, "collectives.py", "exec"), namespace)
    assert namespace["__all__"] == ["CHUNKS", "Chunk", "ring_bytes", "split"]
    assert namespace["ring_bytes"](100, 4) == 150.0
    assert "Bytes are decimal" in text, "comments stay"
    assert "ring_steps" not in text and "print" not in text, "only tagged cells are exported"
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imports == ["from __future__ import annotations", "import numpy as np"], "unused ones go"


def test_exported_module_is_formatted(book):
    edit(book, lambda nb: nb.cells.append(exported("def  f( x:int )->int :\n  'Twice.'\n  return 2*x")))
    assert export.main([], book) == 0
    module = book / "manyranks" / "collectives.py"
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--check",
        f"--config={ROOT / 'pyproject.toml'}",
        module,
    ]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert "def f(x: int) -> int:" in module.read_text(encoding="utf-8")


def test_check_tells_a_stale_module(book, capsys):
    assert export.main(["--check"], book) == 1, "no module yet"
    assert export.main([], book) == 0
    assert export.main(["--check"], book) == 0
    module = book / "manyranks" / "collectives.py"
    module.write_text(module.read_text(encoding="utf-8").replace("150.0", "160.0"), encoding="utf-8")
    capsys.readouterr()
    assert export.main(["--check"], book) == 1
    assert "make export" in capsys.readouterr().err
    assert "160.0" in module.read_text(encoding="utf-8"), "--check writes nothing"


def test_a_module_without_its_chapter_is_an_error(book):
    assert export.main([], book) == 0
    (book / "chapters" / "02_little.ipynb").unlink()
    assert export.main(["--check"], book) == 1


def test_export_by_name(book):
    assert export.main(["collectives"], book) == 0
    assert export.main(["02_little"], book) == 0
    with pytest.raises(SystemExit):
        export.main(["09_nothing"], book)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:", "not plain Python"),
        ("!ls", "not plain Python"),
        ("ring_bytes(8, 4)", "run at every import"),
        ("def split(x):\n    return x", "already exported"),
        ("from manyranks.pipeline import bubble", "earlier chapters only"),
        ("from manyranks import collectives", "earlier chapters only"),
        ("from .overlap import hide", "earlier chapters only"),
        ("import math; import os", "a line of its own"),
        ("def f():\n    return plt.gcf()", "no exported cell defines"),
        ('"""A second docstring."""', "second module docstring"),
    ],
)
def test_what_makes_no_module_is_refused(book, capsys, source, message):
    edit(book, lambda nb: nb.cells.append(exported(source)))
    assert export.main([], book) == 1
    assert message in capsys.readouterr().err
    assert not (book / "manyranks" / "collectives.py").exists()


def test_an_earlier_chapter_may_be_imported(book):
    edit(book, lambda nb: nb.cells.append(exported("from manyranks.memory import GB\n\nTWO = 2 * GB")))
    assert export.main([], book) == 0


def test_docstring_from_a_cell_or_an_error(book, capsys):
    edit(book, lambda nb: nb.metadata.pop("manyranks"))
    assert export.main([], book) == 1
    assert "no module docstring" in capsys.readouterr().err
    edit(book, lambda nb: nb.cells.insert(1, exported('"""One line."""')))
    assert export.main([], book) == 0
    assert '"""One line."""' in (book / "manyranks" / "collectives.py").read_text(encoding="utf-8")


def test_every_chapter_has_a_module():
    assert set(ROOT.glob("chapters/*.ipynb")) == set(export.chapters(ROOT))
    assert len(set(export.ORDER)) == len(export.ORDER)


@pytest.fixture
def two_modules(book, monkeypatch):
    """The book's one chapter, with a cell each for two modules of its own."""
    monkeypatch.setitem(export.MODULES, "02", ("collectives", "costs"))
    monkeypatch.setattr(export, "ORDER", ("memory", "collectives", "costs"))

    def rewrite(nb):
        cells = (
            (
                "collectives",
                "import math\n\nPI = math.pi\n\n\ndef _half(x: float) -> float:\n    return x / 2",
            ),
            ("costs", "def quarter(x: float) -> float:\n    return PI * math.floor(_half(x))"),
        )
        nb.cells[:] = [
            new_code_cell(source, metadata={"tags": [f"export-{module}"]}) for module, source in cells
        ]
        nb.metadata.manyranks = {"docstrings": {"collectives": "First.", "costs": "Second."}}

    edit(book, rewrite)
    return book


def test_two_modules_of_one_chapter(two_modules):
    assert export.main([], two_modules) == 0
    first, second = ((two_modules / "manyranks" / f"{n}.py").read_text() for n in ("collectives", "costs"))
    assert '"""First."""' in first and "quarter" not in first
    assert '"""Second."""' in second and "def _half" not in second
    assert "import math" in second and "from manyranks.collectives import PI, _half" in second
    assert export.main(["--check"], two_modules) == 0


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["export"], "it takes export-collectives, export-costs"),
        (["export-zero"], "it takes"),
        (["export-costs", "export-collectives"], "in two modules"),
    ],
)
def test_a_tag_that_names_no_module_of_the_chapter(two_modules, tags, message, capsys):
    edit(two_modules, lambda nb: nb.cells.append(new_code_cell("X = 1", metadata={"tags": tags})))
    assert export.main([], two_modules) == 1
    assert message in capsys.readouterr().err


def test_an_earlier_module_of_a_chapter_takes_nothing_from_a_later_one(two_modules, capsys):
    source = "def eighth(x: float) -> float:\n    return quarter(x) / 2"
    cell = new_code_cell(source, metadata={"tags": ["export-collectives"]})
    edit(two_modules, lambda nb: nb.cells.append(cell))
    assert export.main([], two_modules) == 1
    assert "quarter" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ refresh


def test_refresh_twice_gives_the_same_file(book):
    edit(book, lambda nb: nb.cells.__setitem__(slice(None), [c for c in nb.cells if c.id != "timing"]))
    path = book / "chapters" / "02_little.ipynb"
    refresh.refresh(path)
    first = path.read_text(encoding="utf-8")
    assert refresh.refresh(path) is False
    assert path.read_text(encoding="utf-8") == first
    nb = nbformat.reads(first, as_version=4)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "widget-view" not in first and "widgets" not in nb.metadata
    assert "<metadata>" not in first and "dc:date" not in first
    assert "execution" not in {key for cell in nb.cells for key in cell.metadata}
    figure = next(cell for cell in nb.cells if cell.id == "figure")
    assert figure.metadata.mystnb.image.alt, "what the page needs stays"


def test_refresh_leaves_a_failing_notebook_as_it_was(book, capsys):
    edit(book, lambda nb: nb.cells.insert(2, new_code_cell("1 / 0")))
    path = book / "chapters" / "02_little.ipynb"
    before = path.read_bytes()
    assert refresh.main([str(path)], book) == 1
    assert path.read_bytes() == before
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_refresh_finds_notebooks_by_name(book):
    path = book / "chapters" / "02_little.ipynb"
    assert refresh.find([], book) == refresh.find(["02"], book) == refresh.find(["02_little"], book) == [path]
    with pytest.raises(refresh.RefreshError, match="no notebook named 03"):
        refresh.find(["03"], book)


def test_normalise_keeps_what_matters_only():
    cell = new_code_cell(
        "x",
        metadata={
            "tags": ["gpu", "export"],
            "execution": {"iopub.execute_input": "now"},
            "scrolled": True,
        },
        execution_count=17,
        outputs=[
            new_output(
                "execute_result",
                {"text/plain": "Slider()", "application/vnd.jupyter.widget-view+json": {"model_id": "ab"}},
                metadata={"text/plain": {"kept": 1}, "other": {"gone": 1}},
                execution_count=17,
            )
        ],
    )
    empty = new_code_cell("", execution_count=3)
    nb = new_notebook(cells=[new_markdown_cell("text"), cell, empty], metadata={"widgets": {}, "vscode": {}})
    stored = refresh.normalise(nb)
    assert set(stored.metadata) == {"kernelspec", "language_info"}
    _, first, second = stored.cells
    assert first.metadata == {"tags": ["export", "gpu"]}
    assert first.execution_count == first.outputs[0].execution_count == 1
    assert first.outputs[0].data == {"text/plain": "Slider()"}
    assert first.outputs[0].metadata == {"text/plain": {"kept": 1}}
    assert second.execution_count is None
    assert nb.cells[1].execution_count == 17, "the argument is left alone"
    assert refresh.normalise(stored) == stored


def test_normalise_refuses_errors_but_those_that_are_meant():
    error = new_output(
        "error", ename="ValueError", evalue="ranks", traceback=["\x1b[31m in /somewhere/file.py"]
    )
    cell = new_code_cell("f()", outputs=[error])
    with pytest.raises(refresh.RefreshError, match="ValueError: ranks"):
        refresh.normalise(new_notebook(cells=[cell]))
    cell.metadata.tags = ["raises-exception"]
    stored = refresh.normalise(new_notebook(cells=[cell]))
    assert stored.cells[0].outputs[0].traceback == ["ValueError: ranks"]


def test_normalise_gives_ids_that_stay():
    cells = [new_code_cell("a"), new_code_cell("a"), new_code_cell("b")]
    nb = new_notebook(cells=cells)
    cells[1]["id"] = cells[0]["id"]
    del cells[2]["id"]
    ids = [cell.id for cell in refresh.normalise(nb).cells]
    assert len(set(ids)) == 3 and ids[0] == cells[0].id
    assert ids == [cell.id for cell in refresh.normalise(nb).cells]


SVG = (
    '<svg xmlns="x">\n <metadata>\n  <dc:date>{date}</dc:date>\n </metadata>\n <defs><path id="m{a}"/>'
    '<clipPath id="p{b}"/></defs><use xlink:href="#m{a}" clip-path="url(#p{b})"/><g id="axes_1"/></svg>'
)


def test_svg_ids_hang_on_the_drawing_only():
    one = refresh.normalise_svg(SVG.format(date="2026-01-01", a="0123456789", b="abcdef0123"))
    two = refresh.normalise_svg(SVG.format(date="2026-02-02", a="fedcba9876", b="9999999999"))
    assert one == two
    assert refresh.normalise_svg(one) == one
    assert "<metadata>" not in one and 'id="axes_1"' in one
    identifier = re.search(r'id="(m\w+)"', one)[1]
    assert one.count(identifier) == 2, "a use follows its definition"
    other = refresh.normalise_svg(
        SVG.replace("axes_1", "axes_2").format(date="", a="0123456789", b="abcdef0123")
    )
    assert identifier not in other, "two drawings on one page don't share ids"


def test_sanitize_patterns_even_out_what_refresh_changes():
    raw = SVG.format(date="2026-01-01", a="0123456789", b="abcdef0123")
    patterns = nbval.get_sanitize_patterns(
        (ROOT / "tests" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    )
    assert len(patterns) == 2

    def sanitized(text):
        for pattern, replacement in patterns:
            text = re.sub(pattern, replacement, text)
        return text

    assert sanitized(raw) == sanitized(refresh.normalise_svg(raw))
    assert sanitized(raw.replace("axes_1", "axes_2")) != sanitized(raw), "what is drawn is compared"


@pytest.mark.slow
def test_nbval_accepts_what_refresh_stores_and_nothing_else(book):
    path = book / "chapters" / "02_little.ipynb"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    command += [
        "--nbval",
        "--nbval-current-env",
        f"--nbval-sanitize-with={ROOT / 'tests/nbval_sanitize.cfg'}",
    ]
    done = subprocess.run([*command, path], capture_output=True, text=True, cwd=book)
    assert done.returncode == 0, done.stdout
    edit(book, lambda nb: nb.cells[2].outputs[0].update(text="3.141\n"))
    done = subprocess.run([*command, path], capture_output=True, text=True, cwd=book)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout


# ------------------------------------------------------------------------------------------------ student copies


def test_student_copy(book):
    assert student.main(["--output", str(book / "out")], book) == 0
    nb = nbformat.read(book / "out" / "02_little.ipynb", as_version=4)
    ids = [cell.id for cell in nb.cells]
    assert "answer" not in ids and "answer-text" not in ids
    assert "ask" in ids and "try" in ids and "last" in ids
    assert "2 * (ranks - 1)\n" not in (book / "out" / "02_little.ipynb").read_text(encoding="utf-8")
    assert not any(cell.get("outputs") for cell in nb.cells)


def test_gated_solutions_go_across_cells():
    start, end = "````{solution-start} ex-1\n:class: dropdown\n````", "````{solution-end}\n````"
    sources = [
        f"Before.\n\n{start}\nThe answer is four.",
        "answer = 2 * 2",
        f"{end}\n\n## Next exercise",
        "pass",
    ]
    make = [new_markdown_cell, new_code_cell, new_markdown_cell, new_code_cell]
    nb = new_notebook(cells=[kind(source) for kind, source in zip(make, sources)])
    assert [cell.source for cell in student.strip(nb).cells] == ["Before.", "## Next exercise", "pass"]

    one_cell = new_notebook(cells=[new_markdown_cell(f"Ask.\n\n{start}\nFour.\n\n{end}\n\nGo on.")])
    assert [cell.source for cell in student.strip(one_cell).cells] == ["Ask.\n\nGo on."]
    for broken in (sources[:2], sources[2:], [sources[0], "x", sources[0]]):
        cells = [new_markdown_cell(source) for source in broken]
        with pytest.raises(student.LeakError):
            student.strip(new_notebook(cells=cells))


@pytest.mark.parametrize(
    "source",
    [
        "### Solution\n\nTwo times.",
        ":::{admonition} Solution\nTwo times.\n:::",
        "```{solution} ring\nTwo times.\n```",
    ],
)
def test_an_untagged_solution_is_found(book, capsys, source):
    edit(book, lambda nb: nb.cells.append(new_markdown_cell(source)))
    assert student.main(["--output", str(book / "out")], book) == 1
    assert "announces a solution" in capsys.readouterr().err
    assert not (book / "out" / "02_little.ipynb").exists()


def test_a_solution_repeated_elsewhere_is_found(book, capsys):
    def repeat(nb):
        answer = next(cell for cell in nb.cells if cell.id == "answer")
        nb.cells.append(new_code_cell("# as above\n" + answer.source))

    edit(book, repeat)
    assert student.main(["--output", str(book / "out")], book) == 1
    assert "in a cell without the tag" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["02", "02_collectives", "collectives", "chapters/02_collectives.ipynb"])
def test_a_chapter_to_export_may_be_named_by_number(name, capsys):
    assert export.main([name, "--check"]) == 0


def test_an_unknown_chapter_to_export(capsys):
    with pytest.raises(SystemExit):
        export.main(["02", "99", "--check"])
    assert "no chapter or module named 99" in capsys.readouterr().err
