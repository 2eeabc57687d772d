"""Build the book into `_build/html`, then check that what should be there is there.

    python tools/build.py             build what changed
    python tools/build.py --strict    warnings are errors
    python tools/build.py --all       build every page again
    python tools/build.py --source tests/site/fixture_book --out _build/fixture

It is `jupyter-book build .` with the checks that tell a book from an empty folder: every page of the table of
contents exists, and no notebook ended in an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def build(source: Path, out: Path, strict: bool, everything: bool) -> int:
    """Run jupyter-book and the checks; return an exit status."""
    command = [
        sys.executable,
        "-c",
        "from jupyter_book.cli.main import main; main()",
        "build",
        str(source),
        "--path-output",
        str(out),
    ]
    if strict:
        command += ["-W", "--keep-going", "-n"]
    if everything:
        command.append("--all")
    status = subprocess.run(command, cwd=source).returncode
    if not status:
        forget(source, out / "_build/html")
    problems = [] if status else check(source, out / "_build/html")
    for problem in problems:
        print(f"build: {problem}", file=sys.stderr)
    if not status and not problems:
        print(f"build: {len(pages(source))} pages in {out / '_build/html'}")
    return status or (1 if problems else 0)


def pages(source: Path) -> list[str]:
    """The documents that `_toc.yml` names."""

    def walk(node):
        for key, value in node.items():
            if key in ("root", "file"):
                yield value
            elif isinstance(value, list):
                for child in value:
                    yield from walk(child)

    return list(walk(yaml.safe_load((source / "_toc.yml").read_text())))


def forget(source: Path, html: Path) -> None:
    """Remove pages that were built once and are no longer in the table of contents; Sphinx leaves them."""
    wanted = {
        f"{Path(page).with_suffix('') if page.endswith(('.md', '.ipynb')) else page}.html"
        for page in pages(source)
    }
    wanted |= {"index.html", "genindex.html", "search.html", "404.html"}
    for file in html.rglob("*.html"):
        name = file.relative_to(html)
        if name.parts[0] not in ("_static", "_sources", "reports") and str(name) not in wanted:
            print(f"build: {name} is no longer in the table of contents; removed")
            file.unlink()


def check(source: Path, html: Path) -> list[str]:
    """What is wrong with the built site, one line each."""
    problems = []
    for page in pages(source):
        name = str(Path(page).with_suffix("")) if page.endswith((".md", ".ipynb")) else page
        file = html / f"{name}.html"
        if not file.exists():
            problems.append(f"page {name} was not built")
        elif 'class="output traceback' in file.read_text(encoding="utf-8"):
            problems.append(f"page {name} shows a traceback")
    for name in ("index.html", "searchindex.js", "genindex.html"):
        if not (html / name).exists():
            problems.append(f"{name} was not built")
    for report in sorted((html / "reports").rglob("*.err.log")) if (html / "reports").exists() else []:
        problems.append(f"a notebook failed: see {report}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the book.")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--all", action="store_true", help="build every page again")
    parser.add_argument("--source", type=Path, default=ROOT, help="folder with _config.yml and _toc.yml")
    parser.add_argument("--out", type=Path, help="folder that gets _build/html (default: the source)")
    given = parser.parse_args()
    source = given.source.resolve()
    raise SystemExit(build(source, (given.out or source).resolve(), given.strict, given.all))


if __name__ == "__main__":
    main()
