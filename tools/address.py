"""The repository's address stands in one place, `_config.yml`; this tells whether everything else agrees, or sets it.

    python tools/address.py                                   # say where the address stands; fail when one differs
    python tools/address.py https://github.com/you/your-fork  # set it everywhere, for a fork
    python tools/address.py https://github.com/you/your-fork --branch main

The notebooks' set-up cells, the badges, the set-up page and the package's links repeat the address because Colab,
GitHub and pip read them as they are. The launch buttons of the pages come from `_config.yml` when the book is built.
A test runs the first form.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
REPEATED = (
    "_config.yml",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "book/**/*.md",
    "chapters/*.ipynb",
)
REPEATED += ("labs/**/*.md", "labs/**/*.ipynb", "manyranks/**/*.yml")

# github.com/owner/name, and Colab's and Binder's forms of it. Links to other repositories are told apart by the name.
OURS = r"(?P<host>github\.com|/github|mybinder\.org/v2/gh)/(?P<owner>[\w.-]+)/(?P<name>NAME)\b"
ADDRESS = re.compile(r"https://github\.com/(?P<owner>[\w.-]+)/(?P<name>[\w.-]+?)(?:\.git)?/?")


class AddressError(Exception):
    """An address that can't be used; the message says what is expected."""


def parse(address: str) -> tuple[str, str]:
    """(owner, name) of a repository on GitHub, which Colab and Binder open notebooks from."""
    found = ADDRESS.fullmatch(address)
    if not found:
        raise AddressError(f"expected https://github.com/<owner>/<name>, got {address!r}")
    return found["owner"], found["name"]


def configured(root: Path = ROOT) -> tuple[str, str]:
    """(address, branch) as `_config.yml` has them."""
    repository = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))["repository"]
    return repository["url"].rstrip("/"), repository["branch"]


def files(root: Path = ROOT) -> list[Path]:
    """The files that repeat the address."""
    return sorted(
        {path for pattern in REPEATED for path in root.glob(pattern) if ".ipynb_checkpoints" not in str(path)}
    )


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(OURS.replace("NAME", re.escape(name)))


def places(root: Path = ROOT) -> list[tuple[Path, int, str, str]]:
    """(file, line, owner, name) of every repetition of this repository's address, under whatever owner."""
    name = parse(configured(root)[0])[1]
    found = []
    for path in files(root):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in _pattern(name).finditer(line):
                found.append((path, number, match["owner"], match["name"]))
    return found


def differing(root: Path = ROOT) -> list[str]:
    """What doesn't agree with `_config.yml`, one line each."""
    address, branch = configured(root)
    owner, name = parse(address)
    found = places(root)
    wrong = [
        f"{path.relative_to(root).as_posix()}, line {number}: {other}/{name}, not {owner}/{name}"
        for path, number, other, _ in found
        if other != owner
    ]
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    options = config.get("sphinx", {}).get("config", {}).get("html_theme_options", {})
    for key, expected in (("repository_url", address), ("repository_branch", branch)):
        if options.get(key, expected) != expected:
            wrong.append(f"_config.yml: {key} is {options[key]}, not {expected}")
    pages = config.get("html", {}).get("baseurl")
    if pages and pages != f"https://{owner.lower()}.github.io/{name}/":
        wrong.append(f"_config.yml: baseurl is {pages}, not https://{owner.lower()}.github.io/{name}/")
    for path in sorted((root / "chapters").glob("*.ipynb")):
        if not any(place == path for place, *_ in found):
            wrong.append(
                f"{path.relative_to(root).as_posix()}: its set-up cell doesn't install from {owner}/{name}"
            )
    return wrong


def move(address: str, branch: str | None = None, root: Path = ROOT) -> list[Path]:
    """Set the address (and the branch) everywhere; returns the files that changed."""
    owner, name = parse(address)
    before, old_branch = configured(root)
    old_owner, old = parse(before)
    changed = []
    for path in files(root):
        text = path.read_text(encoding="utf-8")
        new = _pattern(old).sub(lambda match: f"{match['host']}/{owner}/{name}", text)
        new = new.replace(f"{old_owner.lower()}.github.io/{old}", f"{owner.lower()}.github.io/{name}")
        new = new.replace(f"{old_owner.lower()}.github.io", f"{owner.lower()}.github.io")
        if branch and branch != old_branch:
            new = re.sub(
                rf"({re.escape(f'/{owner}/{name}')}/(?:blob|tree|edit)/){re.escape(old_branch)}\b",
                rf"\g<1>{branch}",
                new,
            )
            if path.name == "_config.yml":
                new = re.sub(
                    rf"(\b(?:repository_)?branch: ){re.escape(old_branch)}$",
                    rf"\g<1>{branch}",
                    new,
                    flags=re.M,
                )
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Check or set the repository's address.")
    parser.add_argument(
        "address", nargs="?", help="https://github.com/<owner>/<name> of a fork; without it, check only"
    )
    parser.add_argument("--branch", help="the branch that readers open (default: as it is)")
    args = parser.parse_args(argv)
    if args.address:
        try:
            changed = move(args.address, args.branch, root)
        except AddressError as error:
            parser.error(str(error))
        for path in changed:
            print(f"set in {path.relative_to(root).as_posix()}")
    wrong = differing(root)
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        address, branch = configured(root)
        print(f"{address}, branch {branch}: {len(places(root))} places agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
