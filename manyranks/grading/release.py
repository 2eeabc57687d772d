"""The student's zip file of a lab: everything but solution, grading-only tests and the grader's switches."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

from manyranks import __version__
from manyranks.grading.lab import Lab, LabError

__all__ = ["HIDDEN", "main", "release", "write_zip"]

HIDDEN = ("solution", "test_grading", "grading.ini")  # names that begin so
SKIPPED = {"__pycache__", ".pytest_cache", ".ipynb_checkpoints", ".hypothesis"}
WORKFLOW = Path(__file__).with_name("class_workflow.yml")


def student_files(lab: Lab) -> dict[str, bytes]:
    """What a student gets, by path.

    Raises: LabError if a file that would go out imports the solution: it couldn't work without it.
    """
    files: dict[str, bytes] = {}
    for path in sorted(lab.folder.rglob("*")):
        inside = path.relative_to(lab.folder)
        if any(part in SKIPPED or part.startswith((".", *HIDDEN)) for part in inside.parts):
            continue
        if path.is_symlink() or not path.is_file() or path.suffix in (".pyc", ".zip"):
            continue
        data = path.read_bytes()
        if path.suffix == ".py" and any(
            line.split()[:2] in (["import", "solution"], ["from", "solution"])
            for line in data.decode("utf-8").splitlines()
        ):
            raise LabError(f"{inside} imports the solution, which students don't have")
        files[inside.as_posix()] = data
    if WORKFLOW.is_file():
        text = WORKFLOW.read_text(encoding="utf-8").replace("VERSION", __version__)
        files[".github/workflows/lab.yml"] = text.encode()
    return files


def write_zip(target: Path, files: dict[str, bytes], executable: tuple[str, ...] = ()) -> None:
    """A zip file whose bytes depend on `files` only."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = (0o100755 if name in executable else 0o100644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, files[name])


def release(lab: Lab, target: Path) -> list[str]:
    """Write the zip file. Returns what is in it, all under one folder of the lab's name."""
    files = {f"{lab.name}/{name}": data for name, data in student_files(lab).items()}
    write_zip(target, files)
    return sorted(files)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m manyranks release", description=__doc__)
    parser.add_argument("lab", type=Path, help="the lab's folder, for example labs/lab-01-parallelism-engine")
    parser.add_argument("--out", type=Path, help="the zip file to write (default: <lab>.zip in this folder)")
    options = parser.parse_args(argv)
    try:
        lab = Lab(options.lab)
        target = options.out or Path(f"{lab.name}.zip")
        names = release(lab, target)
    except (LabError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(f"{target}: {len(names)} files")
    for name in names:
        print(f"  {name}")
    return 0
