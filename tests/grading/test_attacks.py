"""Hostile submissions: each gets what it honestly earned and nothing else, and harms nobody.

Each file of `attacks/` is put behind an honest solution, whose functions it replaces, and is graded in one batch with
honest people in between. Its first comment says what it tries; `earns:` names the tests that it passes honestly.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import threading
from pathlib import Path

import pytest

from manyranks.grading import grade
from manyranks.grading.lab import Lab

ATTACKS = Path(__file__).parent / "attacks"
NAMES = sorted({p.stem for p in ATTACKS.iterdir() if not p.name.startswith((".", "_"))})
KINDS = {"leave": 3, "skip": 3, "pretend": 3, "tamper": 3, "read": 3, "exhaust": 3, "reach": 3}
HONEST = ("aa-first", "mm-middle", "zz-last")
pytestmark = pytest.mark.slow


def source(name: str) -> str:
    path = ATTACKS / name
    return (path / "lab.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


def alive(marker: str) -> list[str]:
    """Processes that hold `marker` in their command line, or the folder `marker` in their mounts."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        for file in ("cmdline", "mountinfo"):
            try:
                text = Path("/proc", entry, file).read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if marker in text:
                found.append(f"{entry}: {file}")
    return found


class Graded:
    """The batch with all attacks in it."""

    def __init__(self, base: Path, little_lab: Path):
        self.marker = f"{4000 + secrets.randbelow(1000)}.{secrets.randbelow(10**9)}"
        self.secret = f"CANARY-{secrets.token_hex(8)}"
        self.tmp = base / "tmp"
        self.out = base / "out"
        handed_in = base / "handed-in"
        for folder in (self.tmp, handed_in):
            folder.mkdir()
        (base / "marks-of-last-year.txt").write_text(f"{self.secret}\n")
        (base / "marks-of-last-year.txt").chmod(0o644)
        solution = (little_lab / "solution.py").read_text().replace("CANARY-SOLUTION", "")
        for name in HONEST:
            (handed_in / name).mkdir()
            (handed_in / name / "lab.py").write_text(f"{solution}\n# {self.secret}\n")
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.visits: list[object] = []

            def listen() -> None:
                try:
                    while True:
                        self.visits.append(server.accept())
                except OSError:
                    pass

            threading.Thread(target=listen, daemon=True).start()
            port = server.getsockname()[1]
            for name in NAMES:
                folder = handed_in / name
                folder.mkdir()
                given = f"PORT = {port}\nMARKER = {self.marker!r}\n"
                (folder / "lab.py").write_text(f"{solution}\n\n{given}\n{source(name)}")
                if (ATTACKS / name).is_dir():
                    for path in (ATTACKS / name).iterdir():
                        if path.is_file() and path.name != "lab.py":
                            (folder / path.name).write_bytes(path.read_bytes())
            self.links(handed_in, little_lab)
            before = dict(os.environ)
            os.environ.update(TMPDIR=str(self.tmp), MANYRANKS_SECRET=self.secret)
            import tempfile

            tempfile.tempdir = None
            try:
                self.status = grade.main(
                    [str(little_lab), str(handed_in), "--out", str(self.out), "--jobs", "2"]
                )
            finally:
                os.environ.clear()
                os.environ.update(before)
                tempfile.tempdir = None
            server.close()
        self.results = {}
        for path in (self.out / "state").glob("*.json"):
            kept = json.loads(path.read_text())
            if "result" in kept:
                self.results[kept["result"]["student"]] = kept["result"]
        self.points = {t.split("::")[1]: p for t, p in self._points()}

    def _points(self):
        plan = json.loads((self.out / "state" / "plan.json").read_text())
        return [(t["name"], t["points"]) for t in plan["tests"]]

    @staticmethod
    def links(handed_in: Path, little_lab: Path) -> None:
        """Reading the answers with the grader's own eyes: links instead of files."""
        for name, target in (
            ("read_link_1", little_lab / "solution.py"),
            ("read_link_2", handed_in / HONEST[0] / "lab.py"),
            ("read_link_3", Path("/etc/passwd")),
        ):
            (handed_in / name).mkdir()
            (handed_in / name / "lab.py").symlink_to(target)
        (handed_in / "read_link_4").symlink_to(handed_in / HONEST[0])
        (handed_in / "exhaust_pipe_1").mkdir()
        os.mkfifo(handed_in / "exhaust_pipe_1" / "lab.py")


@pytest.fixture(scope="module")
def graded(sandbox_mode, little_lab, tmp_path_factory) -> Graded:
    base = tmp_path_factory.mktemp("attacks")
    return Graded(base, little_lab)


def test_there_are_three_of_each_kind():
    for kind, least in KINDS.items():
        assert sum(name.startswith(f"{kind}_") for name in NAMES) >= least, kind


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_gets_what_it_earned(graded, name):
    if "ExceptionGroup" in source(name) and sys.version_info < (3, 11):
        pytest.skip("there are no exception groups before Python 3.11")
    earns = re.search(r"# earns: (.*)", source(name))[1]
    expected = set() if earns == "nothing" else set(earns.split())
    result = graded.results[name]
    passed = {o["name"].split("::")[1] for o in result["outcomes"] if o["passed"]}
    said = {o["name"].split("::")[1]: o["message"] for o in result["outcomes"]}
    assert passed == expected, said
    assert {o["name"].split("::")[1] for o in result["outcomes"]} == set(graded.points)  # none is lost
    assert all(said[t] for t in set(graded.points) - passed), "a failed test without a message"
    assert not any(said[t] for t in passed)


@pytest.mark.parametrize("name", [*NAMES, *HONEST])
def test_nothing_is_read_that_should_not_be(graded, name):
    text = json.dumps(graded.results[name])
    assert "LEAK" not in text, re.findall(r"LEAK[^\\]*", text)[:5]
    assert "CANARY" not in text


@pytest.mark.parametrize("name", ["read_link_1", "read_link_2", "read_link_3", "exhaust_pipe_1"])
def test_links_and_pipes_are_not_followed(graded, name):
    result = graded.results[name]
    assert result["kind"] == "link" and "Hand in the file itself" in result["problem"]
    assert not any(o["passed"] for o in result["outcomes"])


def test_a_linked_folder_is_no_submission(graded):
    assert "read_link_4" not in graded.results


def test_the_batch_went_on(graded):
    assert graded.status == 0
    for name in HONEST:
        assert all(o["passed"] for o in graded.results[name]["outcomes"]), name
    rows = (graded.out / "marks.csv").read_text().splitlines()
    assert len(rows) == 1 + len(NAMES) + len(HONEST) + 4


def test_no_secret_is_in_what_students_get(graded):
    for path in [*graded.out.glob("feedback/*.html"), graded.out / "report.html", graded.out / "marks.csv"]:
        text = path.read_text()
        assert "CANARY" not in text and graded.secret not in text, path
        assert "<script" not in text and "alert(1)</" not in text, path


def test_nothing_is_left_running(graded):
    assert alive(graded.marker) == []
    assert alive(str(graded.tmp)) == []


def test_nothing_is_left_behind(graded):
    assert list(graded.tmp.iterdir()) == []


def test_nobody_was_reached(graded):
    assert graded.visits == []


def test_the_lab_is_as_it_was(graded, little_lab):
    assert {p.name for p in Lab(little_lab).folder.iterdir()} - {"__pycache__"} == {
        *(
            "README.md",
            "grading.ini",
            "lab.py",
            "pytest.ini",
            "solution.py",
            "test_grading.py",
            "test_lab.py",
        ),
    }
