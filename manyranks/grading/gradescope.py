"""A lab's autograder for Gradescope: the zip file to upload, and what runs in its container.

Gradescope starts a container for each submission and throws it away afterwards. In it the grader uses bubblewrap where
the container may make namespaces. Where it may not, it separates by users instead: the tests, the solution and the
results belong to root, the submission runs as other users, without network and new privileges (a system-call filter),
with the same limits. What such a container can't keep apart is one submission from itself: a lab's ranks could leave each
other notes in a file. There is no other submission in it, and the mark is made outside the submission's reach as always.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path

from manyranks.grading.batch import Batch, Result
from manyranks.grading.collect import read_one
from manyranks.grading.lab import Lab, LabError, Plan
from manyranks.grading.marks import tidy
from manyranks.grading.release import SKIPPED, write_zip
from manyranks.grading.sandbox import SandboxUnavailable, find_mode

__all__ = ["autograder", "main", "results_json"]

VISIBILITIES = ("hidden", "after_due_date", "after_published", "visible")

SETUP = """#!/usr/bin/env bash
# Runs once, as root, when Gradescope builds the image.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends python3 python3-venv bubblewrap
python3 -m venv /autograder/venv
/autograder/venv/bin/python -m pip install {requirements}
cp -r /autograder/source/manyranks "$(/autograder/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/"
chmod -R u=rwX,go= /autograder/source
# The lab's own solution has to get full marks here, or the image is not built.
cd / && /autograder/venv/bin/python -m manyranks.grading.gradescope check /autograder/source/lab
"""

RUN = """#!/usr/bin/env bash
# Runs as root for each submission.
set -euo pipefail
chmod 700 /autograder/source /autograder/results
chmod 711 /tmp
chmod 700 /dev/shm /var/tmp 2>/dev/null || true
cd / && exec /autograder/venv/bin/python -m manyranks.grading.gradescope run /autograder/source/lab
"""


def autograder(lab: Lab, target: Path, hidden: str = "after_published") -> list[str]:
    """Write the zip file. Returns what is in it; the same lab and grader give the same bytes."""
    import manyranks

    files: dict[str, bytes] = {}
    package = Path(next(iter(manyranks.__path__)))
    for folder, name in ((package, "manyranks"), (lab.folder, "lab")):
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and not path.is_symlink() and path.suffix != ".pyc":
                if not any(part in SKIPPED or part.startswith(".") for part in inside.parts):
                    files[f"{name}/{inside.as_posix()}"] = path.read_bytes()
    files["setup.sh"] = SETUP.format(requirements=" ".join(f"'{r}'" for r in _requirements())).encode()
    files["run_autograder"] = RUN.encode()
    files["options.json"] = json.dumps({"hidden": hidden}).encode()
    write_zip(target, files, executable=("setup.sh", "run_autograder"))
    return sorted(files)


def _requirements() -> list[str]:
    """The package's own lower bounds, and pytest."""
    try:
        needs = [r for r in metadata.requires("manyranks") or [] if "extra ==" not in r]
    except metadata.PackageNotFoundError:
        needs = [
            "array-api-compat>=1.9",
            "cloudpickle>=3.0",
            "greenlet>=3.0",
            "matplotlib>=3.8",
            "numpy>=2.0",
            "tqdm>=4.66",
        ]
    return sorted([*needs, "pytest>=8"])


def results_json(result: Result, plan: Plan, hidden: str = "after_published", note: str = "") -> dict:
    """What Gradescope reads, by its specification. The tests that students don't have are shown as `hidden` says."""
    said = [result.problem, *result.notes, note]
    tests = []
    for outcome, test in zip(result.outcomes, plan.tests):
        output = test.doc
        if not outcome.passed:
            output = "\n\n".join(
                filter(None, [test.doc, outcome.message, outcome.where and f"In your code:\n{outcome.where}"])
            )
        tests.append(
            {
                "name": test.short,
                "score": tidy(test.points if outcome.passed else 0),
                "max_score": tidy(test.points),
                "status": "passed" if outcome.passed else "failed",
                "output": output,
                "output_format": "text",
                "visibility": "visible" if test.public else hidden,
            }
        )
    return {
        "score": tidy(result.points),
        "execution_time": round(result.seconds, 2),
        "output": "\n".join(s for s in said if s),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }


def _run(lab_folder: Path, submission: Path, results: Path | None) -> int:
    """In the container: check the lab, or grade one submission."""
    lab = Lab(lab_folder)
    mode = find_mode(allow_uid=True)
    batch = Batch(lab, lab_folder.parent / "kept", jobs=1, mode=mode)
    print(f"sandbox: {mode}; the lab's solution passes {len(batch.plan.tests)} tests")
    if results is None:
        return 0
    result = batch.grade(read_one(submission, "student", lab.allow_helpers))
    if not result.graded:
        print(result.problem, file=sys.stderr)
        return 1  # without results.json Gradescope reports a failure, not a zero
    try:
        hidden = json.loads((lab_folder.parent / "options.json").read_text())["hidden"]
    except (OSError, ValueError, KeyError):
        hidden = "after_published"
    text = json.dumps(results_json(result, batch.plan, hidden), indent=1)
    results.write_text(text, encoding="utf-8", errors="backslashreplace")
    print(f"{tidy(result.points)} of {tidy(batch.plan.points)} points")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m manyranks gradescope",
        description="Write the zip file that Gradescope takes as an autograder.",
    )
    parser.add_argument("lab", type=Path, help="the lab's folder, for example labs/lab-01-parallelism-engine")
    parser.add_argument(
        "--out", type=Path, help="the zip file to write (default: <lab>-gradescope.zip in this folder)"
    )
    parser.add_argument(
        "--hidden-tests",
        choices=VISIBILITIES,
        default="after_published",
        help="when students see grading-only tests",
    )
    options = parser.parse_args(argv)
    try:
        lab = Lab(options.lab)
        target = options.out or Path(f"{lab.name}-gradescope.zip")
        names = autograder(lab, target, options.hidden_tests)
    except (LabError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(
        f"{target}: {len(names)} files; upload it under Configure Autograder. It holds the solution: not for students."
    )
    return 0


def _inside(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m manyranks.grading.gradescope")
    parser.add_argument("what", choices=("check", "run"))
    parser.add_argument("lab", type=Path)
    parser.add_argument("--submission", type=Path, default=Path("/autograder/submission"))
    parser.add_argument("--results", type=Path, default=Path("/autograder/results/results.json"))
    options = parser.parse_args(argv)
    try:
        return _run(options.lab, options.submission, options.results if options.what == "run" else None)
    except (LabError, SandboxUnavailable, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_inside(sys.argv[1:]))
