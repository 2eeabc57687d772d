"""A lab, as the grader sees it: its folder, its tests and their points, and the switches of `grading.ini`."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from manyranks.grading.sandbox import Limits

__all__ = ["Lab", "LabError", "Plan", "Test"]


class LabError(ValueError):
    """The lab's folder is not one, or its own solution doesn't pass."""


@dataclass
class Test:
    """One test function: all of its cases have to pass for its points."""

    __test__ = False  # not one of pytest's own

    name: str  # "test_lab.py::test_ring"
    points: float
    doc: str
    cases: list[str] = field(default_factory=list)

    @property
    def short(self) -> str:
        return self.name.partition("::")[2]

    @property
    def public(self) -> bool:
        """Whether students have this test."""
        return self.name.startswith("test_lab.py")


@dataclass
class Plan:
    """What a submission is graded by: taken from a run of the lab's own solution, never from a submission."""

    tests: list[Test]

    @property
    def points(self) -> float:
        return sum(test.points for test in self.tests)


class Lab:
    """The folder of a lab.

    `grading.ini`, if there is one, may say::

        [lab]
        title = Lab 1: the parallelism engine
        allow_helpers = yes           ; further .py files beside lab.py are taken along
        [limits]
        call_seconds = 20             ; any field of manyranks.grading.sandbox.Limits
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        for name in ("lab.py", "solution.py", "test_lab.py"):
            if not (self.folder / name).is_file():
                raise LabError(f"{folder} is no lab: it has no {name}")
        self.name = self.folder.name
        ini = configparser.ConfigParser(inline_comment_prefixes=(";", "#"))
        ini.read(self.folder / "grading.ini", encoding="utf-8")
        unknown = [s for s in ini.sections() if s not in ("lab", "limits")]
        if unknown:
            raise LabError(f"grading.ini: unknown section [{unknown[0]}]; there are [lab] and [limits]")
        self.title = ini.get("lab", "title", fallback=None) or self._heading() or self.name
        try:
            self.allow_helpers = ini.getboolean("lab", "allow_helpers", fallback=False)
        except ValueError:
            raise LabError("grading.ini: allow_helpers is yes or no") from None
        kinds = {f.name: type(f.default) for f in dataclasses.fields(Limits)}
        changes = {}
        for name, text in ini.items("limits") if ini.has_section("limits") else ():
            if name not in kinds:
                raise LabError(f"grading.ini: unknown limit {name!r}; there are {', '.join(kinds)}")
            try:
                changes[name] = kinds[name](float(text))
            except ValueError:
                raise LabError(f"grading.ini: {name} must be a number, got {text!r}") from None
        self.limits = dataclasses.replace(Limits(), **changes)

    def _heading(self) -> str:
        try:
            lines = (self.folder / "README.md").read_text(encoding="utf-8").splitlines()
        except OSError:
            return ""
        return next((line[2:].strip() for line in lines if line.startswith("# ")), "")

    @property
    def preload(self) -> list[str]:
        """Installed modules that the solution imports: the sandbox imports them once for all children."""
        found: list[str] = []
        for node in ast.walk(ast.parse((self.folder / "solution.py").read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                root = name.partition(".")[0]
                if root not in sys.stdlib_module_names and not (self.folder / f"{root}.py").exists():
                    if name not in found and _installed(name):
                        found.append(name)
        return found

    def digest(self) -> str:
        """Changes with whatever a mark may depend on: tests, limits, the seed, the grader's own version."""
        import manyranks

        state = hashlib.sha256(repr((manyranks.__version__, self.limits, self.allow_helpers)).encode())
        state.update(os.environ.get("LAB_SEED", "").encode())
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".py", ".ini", ".json", ".csv", ".npz") and path.name != "lab.py":
                state.update(path.name.encode() + b"\0" + path.read_bytes())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            state.update(path.read_bytes())
        return state.hexdigest()


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
