"""Generate `manyranks/<concept>.py` from the chapter notebooks.

A concept's code is written once, in the cells of its chapter that carry the tag `export`. This script joins those
cells into a module. A chapter of several concepts has several modules: there the tag is `export-<module>`, and what
one module takes from those before it in the same chapter is imported for it.

    python tools/export.py                 # write every module whose chapter exists
    python tools/export.py 02_collectives  # one chapter, by its notebook's or its module's name
    python tools/export.py --check         # write nothing; fail when a module is stale (CI runs this)

Nothing but the tag stands in the notebook, so that a reader of the page sees plain code. The module's docstring is
the notebook's metadata `manyranks.docstring` (`manyranks.docstrings`, by module, where there are several), or an
exported cell that is one string and nothing else (tag it `remove-cell` too). Imports move to the top, unused ones go, `__all__` lists the public names, and ruff formats the
result.

An exported cell that would not make a good module is an error: a name defined only in a cell that is not exported, a
demonstration (a bare expression) among the definitions, two definitions of one name, an import of the same or a later
chapter's module.

Why not nbdev: its `#| export` comments and its settings would show in the pages. Why not nbconvert: it removes cells
by tag but doesn't select them, and what remains (imports, `__all__`, checks) is the larger part.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = "chapters"
PACKAGE = "manyranks"

# Chapter -> its modules, in reading order: a module may import those above it only. A chapter is found by how its
# notebook's name begins.
MODULES: dict[str, tuple[str, ...]] = {
    "01": ("memory",),
    "02": ("collectives",),
    "03": ("data_parallel",),
    "04": ("tensor_parallel",),
    "05": ("pipeline",),
    "06": ("zero",),
    "07": ("grid", "models", "five_axes", "planner", "search", "iteration"),
    "08": ("overlap", "recomputation", "precision", "frameworks", "resume"),
    "beyond_1": ("long_context",),
    "beyond_2": ("mixture_of_experts",),
}
ORDER = tuple(module for modules in MODULES.values() for module in modules)

HEADER = """\
# Generated from {notebook} by tools/export.py: edit the notebook, then run `make export`.
"""


class ExportError(Exception):
    """An exported cell that can't become part of a module; the message says which cell and what to do."""


@dataclass
class Parts:
    """What the exported cells of one notebook hold."""

    docstring: str = ""
    imports: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    public: list[str] = field(default_factory=list)
    private: list[str] = field(default_factory=list)
    defined: dict[str, str] = field(default_factory=dict)  # function or class -> the cell that defines it


def chapters(root: Path = ROOT) -> dict[Path, tuple[Path, ...]]:
    """The table notebook -> its modules for the chapters that exist under `root`, in reading order."""
    table = {}
    for beginning, modules in MODULES.items():
        for notebook in sorted((root / CHAPTERS).glob(f"{beginning}_*.ipynb")):
            table[notebook] = tuple(root / PACKAGE / f"{module}.py" for module in modules)
    return table


def goes_by(notebook: Path, name: str) -> bool:
    """Whether a command means this notebook by `name`: its own, or the beginning of it, such as 07 or beyond_1."""
    return f"{notebook.stem}_".startswith(f"{name}_")


def is_exported(tags: Iterable[str]) -> bool:
    """Whether a cell with these tags is part of a module."""
    return any(tag == "export" or tag.startswith("export-") for tag in tags)


def exported_cells(notebook: Path, module: str | None = None) -> list[tuple[str, str]]:
    """(where, source) of the code cells of `module`, of every module for None; `where` names the cell in messages."""
    nb = nbformat.read(notebook, as_version=4)
    siblings = _siblings(module)
    known = {"export"} if len(siblings) == 1 else {f"export-{name}" for name in siblings}
    wanted = known if len(siblings) == 1 else {f"export-{module}"}
    cells, code_number = [], 0
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        code_number += 1
        tags = {tag for tag in cell.metadata.get("tags", []) if is_exported([tag])}
        where = f"{notebook.name}, code cell {code_number} (id {cell.get('id', '?')})"
        if module is not None and not tags <= known:
            raise ExportError(
                f"{where}: tag {', '.join(sorted(tags - known))}; it takes {', '.join(sorted(known))}"
            )
        if len(tags) > 1:
            raise ExportError(f"{where}: in two modules, {' and '.join(sorted(tags))}")
        if tags and (module is None or tags <= wanted):
            cells.append((where, cell.source))
    return cells


def _siblings(module: str | None) -> tuple[str, ...]:
    """The modules of the chapter that `module` belongs to, itself among them."""
    return next((modules for modules in MODULES.values() if module in modules), (module or "",))


def collect(notebook: Path, module: str) -> Parts:
    """Sort the exported cells of `notebook` into docstring, imports, body and public names."""
    nb = nbformat.read(notebook, as_version=4)
    metadata = nb.metadata.get(PACKAGE, {})
    docstring = metadata.get("docstrings", {}).get(module) or metadata.get("docstring", "")
    parts = Parts(docstring=docstring.strip())
    for where, source in exported_cells(notebook, module):
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            raise ExportError(f"{where}: not plain Python ({error.msg}, line {error.lineno})") from None
        if len(tree.body) == 1 and _is_string(tree.body[0]):
            if parts.docstring:
                raise ExportError(f"{where}: a second module docstring")
            parts.docstring = textwrap.dedent(tree.body[0].value.value).strip()
            continue
        _add_cell(parts, where, source, tree, module)
    if (parts.body or parts.imports) and not parts.docstring:
        raise ExportError(
            f"{notebook.name}: no module docstring; write it in the notebook's metadata as "
            f'{{"{PACKAGE}": {{"docstring": "..."}}}} or as an exported cell that is one string'
        )
    _import_from_siblings(parts, notebook, module)
    return parts


def _import_from_siblings(parts: Parts, notebook: Path, module: str) -> None:
    """Import what earlier modules of the same chapter define; unused imports are dropped later.

    The cells share one namespace in the notebook, so that no reader's cell imports what stands above it.
    """
    siblings = _siblings(module)
    for sibling in siblings[: siblings.index(module)]:
        before = Parts()
        for where, source in exported_cells(notebook, sibling):
            _add_cell(before, where, source, ast.parse(source), sibling)
        names = [name for name in [*before.public, *before.private] if name not in parts.public]
        if names:
            parts.imports.append(f"from {PACKAGE}.{sibling} import {', '.join(names)}")
        parts.imports.extend(text for text in before.imports if text not in parts.imports)


def _is_string(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _add_cell(parts: Parts, where: str, source: str, tree: ast.Module, module: str) -> None:
    lines: list[str | None] = list(source.splitlines())
    for position, node in enumerate(tree.body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _check_direction(node, where, module)
            span = slice(node.lineno - 1, node.end_lineno)
            neighbours = [n for n in tree.body if n is not node]
            if any(n.lineno <= node.end_lineno and n.end_lineno >= node.lineno for n in neighbours):
                raise ExportError(f"{where}: give the import on line {node.lineno} a line of its own")
            text = "\n".join(source.splitlines()[span])
            if text not in parts.imports:
                parts.imports.append(text)
            lines[span] = [None] * (node.end_lineno - node.lineno + 1)
        elif isinstance(node, ast.Expr):
            after_name = position > 0 and isinstance(tree.body[position - 1], (ast.Assign, ast.AnnAssign))
            if not (_is_string(node) and after_name):  # a string under a constant documents it
                raise ExportError(
                    f"{where}: line {node.lineno} is an expression and would run at every import; "
                    "move the demonstration to a cell of its own"
                )
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            if node.name in parts.defined and not any(
                "overload" in d or ".register" in d for d in decorators
            ):
                raise ExportError(f"{where}: {node.name} is already exported by {parts.defined[node.name]}")
            parts.defined.setdefault(node.name, where)
            _publish(parts, node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n for t in targets for n in ast.walk(t)):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    _publish(parts, name.id)
    text = "\n".join(line for line in lines if line is not None).strip("\n")
    if text.strip():
        parts.body.append(text)


def _publish(parts: Parts, name: str) -> None:
    names = parts.private if name.startswith("_") else parts.public
    if name not in names:
        names.append(name)


def _check_direction(node: ast.Import | ast.ImportFrom, where: str, module: str) -> None:
    """Refuse imports of this chapter's own or a later chapter's module."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        names = [f"{PACKAGE}.{name}" if node.level else name for name in names]
    for name in names:
        pieces = name.split(".")
        if pieces[0] == PACKAGE and len(pieces) > 1 and pieces[1] in ORDER:
            if module in ORDER and ORDER.index(pieces[1]) >= ORDER.index(_siblings(module)[0]):
                raise ExportError(f"{where}: {module} may import earlier chapters only, not {pieces[1]}")


def render(notebook: Path, module: str, root: Path = ROOT) -> str:
    """The text of the module that `notebook` generates."""
    parts = collect(notebook, module)
    if not (parts.body or parts.imports):
        tag = "export" if len(_siblings(module)) == 1 else f"export-{module}"
        raise ExportError(f"{notebook.name}: no cell is tagged `{tag}`")
    quoted = parts.docstring.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    quoted += "\n" if "\n" in quoted else ""
    sections = [
        HEADER.format(notebook=notebook.relative_to(root).as_posix()) + f'"""{quoted}"""',
        "\n".join(parts.imports),
        f"__all__ = {sorted(parts.public)!r}",
        "\n\n\n".join(parts.body),
    ]
    text = "\n\n".join(section for section in sections if section) + "\n"
    name = f"{PACKAGE}/{module}.py"
    # Sorted and used imports first, since formatting depends on them; then every name must be known.
    text = _ruff(["check", "--select=I001,F401", "--fix-only"], text, name)
    text = _ruff(["format"], text, name)
    _ruff(["check", "--select=F821,F822", "--output-format=concise"], text, name, notebook)
    return text


def _ruff(command: list[str], text: str, name: str, notebook: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, f"--config={ROOT / 'pyproject.toml'}", "--quiet"]
        + [f"--stdin-filename={name}", "-"],
        input=text,
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
    )
    if done.returncode:
        if notebook is None:
            raise ExportError(f"ruff {command[0]} failed on {name}:\n{done.stderr}{done.stdout}")
        raise ExportError(
            f"{notebook.name}: exported code uses names that no exported cell defines; export their cells too:\n"
            + textwrap.indent(done.stdout.strip(), "  ")
        )
    return done.stdout


def orphans(root: Path = ROOT) -> list[Path]:
    """Generated modules whose notebook is gone."""
    kept = {module for modules in chapters(root).values() for module in modules}
    start = HEADER.split("{", 1)[0]
    return [
        path
        for path in (root / PACKAGE / f"{module}.py" for module in ORDER)
        if path.exists() and path not in kept and path.read_text(encoding="utf-8").startswith(start)
    ]


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Generate manyranks/<concept>.py from the chapters' exported cells."
    )
    parser.add_argument("names", nargs="*", help="notebooks, by name or number, or modules (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a module is stale")
    args = parser.parse_args(argv)

    table = [(notebook, module) for notebook, modules in chapters(root).items() for module in modules]
    if args.names:
        wanted = {Path(name).stem for name in args.names}
        meant = {name: [(n, m) for n, m in table if name == m.stem or goes_by(n, name)] for name in wanted}
        unknown = {name for name, pairs in meant.items() if not pairs}
        table = [pair for pair in table if any(pair in pairs for pairs in meant.values())]
        if unknown:
            parser.error(f"no chapter or module named {', '.join(sorted(unknown))}")

    failures = 0
    for notebook, module in table:
        shown = module.relative_to(root).as_posix()
        try:
            text = render(notebook, module.stem, root)
        except ExportError as error:
            print(f"{shown}: {error}", file=sys.stderr)
            failures += 1
            continue
        current = module.read_text(encoding="utf-8") if module.exists() else None
        if text == current:
            print(f"{shown}: up to date")
        elif args.check:
            print(f"{shown}: stale, or edited by hand; run `make export`", file=sys.stderr)
            failures += 1
        else:
            module.parent.mkdir(parents=True, exist_ok=True)
            module.write_text(text, encoding="utf-8")
            print(f"{shown}: written from {notebook.relative_to(root).as_posix()}")
    for path in orphans(root) if not args.names else []:
        print(f"{path.relative_to(root).as_posix()}: generated, but its notebook is gone", file=sys.stderr)
        failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
