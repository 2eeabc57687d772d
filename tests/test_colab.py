"""A rehearsal of Colab: its preinstalled versions, one notebook alone in an empty folder, its own set-up cell.

The set-up cell runs as it stands in the notebook. It installs from the repository's address; git is told to take this
checkout instead, tagged as the release that the cell names. Then every chapter runs to its end, and what was
preinstalled is what it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

from tools import address, export

ROOT = Path(__file__).resolve().parent.parent
PREINSTALLED = ROOT / "tests/fixtures/colab.txt"
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
RUN = """
import sys, nbformat
from nbclient import NotebookClient
nb = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(nb, timeout=240, kernel_name="python3").execute()
print(sum(len(cell.get("outputs", [])) for cell in nb.cells), "outputs")
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info >= (3, 14), reason="Colab's packages are older than this Python"),
]


def _run(command: list[str | Path], **kwargs) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def _release(folder: Path) -> str:
    """This checkout as a git repository in `folder`, tagged with the release that the set-up cells name."""
    listed = _run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    tags = {
        tag
        for path in CHAPTERS
        for tag in re.findall(r"\.git@|@(v[\w.]+)", path.read_text(encoding="utf-8"))
        if tag
    }
    assert len(tags) == 1, f"the set-up cells name different releases: {sorted(tags)}"
    identity = ["-c", "user.name=rehearsal", "-c", "user.email=rehearsal@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "rehearsal"], ["tag", *tags]):
        _run(["git", *command], cwd=folder)
    return tags.pop()


def _versions(python: Path) -> dict[str, str]:
    listed = json.loads(_run([python, "-m", "pip", "list", "--format=json"]).stdout)
    return {package["name"].lower().replace("-", "_"): package["version"] for package in listed}


@pytest.fixture(scope="module")
def colab() -> Iterator[tuple[Path, dict[str, str], dict[str, str]]]:
    """(Python, its packages, environment) of a machine like Colab's, on which the package isn't installed yet."""
    with tempfile.TemporaryDirectory(prefix="colab-") as name:
        folder = Path(name)
        if not shutil.which("git"):
            pytest.skip("no git, which the set-up cell installs with")
        (folder / "release").mkdir()
        _release(folder / "release")
        _run([sys.executable, "-m", "venv", folder / "venv"])
        python = folder / "venv/bin/python"
        torch = next(
            line
            for line in (ROOT / "requirements.txt").read_text().splitlines()
            if line.startswith("torch==")
        )
        _run([python, "-m", "pip", "install", "--quiet", "-r", PREINSTALLED, torch.split(";")[0].strip()])
        # Colab's own module, by which the set-up cell knows where it is.
        site = Path(
            _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip()
        )
        (site / "google/colab").mkdir(parents=True)
        (site / "google/colab/__init__.py").write_text("")
        (site / "google-colab.pth").write_text("import google.colab\n")
        environment = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        environment |= {
            "PATH": f"{python.parent}{os.pathsep}{environment['PATH']}",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.file://{folder}/release.insteadOf",
            "GIT_CONFIG_VALUE_0": address.configured()[0],
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "IPYTHONDIR": str(folder / "ipython"),
        }
        yield python, _versions(python), environment


@pytest.fixture(scope="module")
def runs(colab, tmp_path_factory) -> dict[str, subprocess.CompletedProcess[str]]:
    """Every chapter, run alone in an empty folder; the first installs the package, the rest run two at a time."""
    python, _, environment = colab

    def run(chapter: Path) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp(chapter.stem)
        shutil.copy(chapter, folder)
        command = [str(python), "-c", RUN, chapter.name]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
        )

    with ThreadPoolExecutor(2) as pool:
        done = [run(CHAPTERS[0]), *pool.map(run, CHAPTERS[1:])]
    return {chapter.stem: result for chapter, result in zip(CHAPTERS, done)}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_alone(chapter, runs):
    done = runs[chapter.stem]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 20, "the notebook showed next to nothing"


def test_nothing_preinstalled_has_changed(colab, runs):
    python, before, _ = colab
    after = _versions(python)
    changed = {
        name: (version, after.get(name)) for name, version in before.items() if after.get(name) != version
    }
    assert not changed, f"installing the package changed what Colab had: {changed}"
    assert "manyranks" in after, "the set-up cell installed nothing"
    assert after.keys() - before.keys() <= {"manyranks", "array_api_compat"}, (
        "more than the package's own needs"
    )


def test_every_chapter_installs_the_same_way():
    ways = set()
    for path in CHAPTERS:
        nb = nbformat.read(path, as_version=4)
        first = next(cell.source for cell in nb.cells if cell.cell_type == "code")
        ways.add(first[first.index("if ") :])
    assert len(ways) == 1
    assert "google.colab" in ways.pop()
    assert len(CHAPTERS) == len(export.chapters(ROOT))
