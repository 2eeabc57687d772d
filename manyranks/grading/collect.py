"""Submissions: from a folder as it comes out of an LMS to one checked file for each student.

What a student can hand in, and what becomes of it, is `Submission.problem` (no mark but zero) or a line of
`Submission.notes` (graded all the same). Nothing is followed out of the folder: no links, no devices, no paths that
climb out of a zip file.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import re
import stat
import tokenize
import unicodedata
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

__all__ = ["Submission", "collect", "read_one", "student_of"]

MAX_FILE = 2_000_000  # bytes of a Python file
MAX_FILES = 200
MAX_ZIP = 20_000_000  # unpacked
SKIPPED = {
    "__MACOSX",
    "__pycache__",
    ".git",
    ".ipynb_checkpoints",
    ".venv",
    "venv",
    "node_modules",
    ".pytest_cache",
}
# what a student got with the lab; handed in again, it is not looked at
RELEASED = {"test_lab.py", "conftest.py", "setup.py"}

_CANVAS = re.compile(
    r"^(?P<name>[^_]+)_(?P<late>LATE_)?(?P<id>\d+)_(?P<submission>\d+)_(?P<file>.+)$", re.DOTALL
)
_MOODLE = re.compile(r"^(?P<name>.+)_(?P<id>\d+)_assignsubmission_file_?(?P<file>.*)$", re.DOTALL)


@dataclass
class Submission:
    """What one student handed in."""

    student: str  # the name in the marks
    id: str = ""  # the LMS's number, where the file name holds one
    late_flag: bool = False  # Canvas marks late files in their names
    when: float | None = None  # seconds since 1970, of the newest file
    files: dict[str, bytes] = field(default_factory=dict)  # lab.py and what goes along
    notes: list[str] = field(default_factory=list)
    problem: str = ""  # why there is nothing to run
    kind: str = "ok"  # missing, empty, misnamed, unreadable, link, too-large ...

    def refuse(self, kind: str, problem: str) -> None:
        self.kind, self.problem = kind, problem
        self.files.clear()

    def digest(self) -> str:
        state = hashlib.sha256(repr((self.kind, self.problem)).encode())
        for name in sorted(self.files):
            state.update(name.encode() + b"\0" + len(self.files[name]).to_bytes(8, "big") + self.files[name])
        return state.hexdigest()


def student_of(name: str) -> tuple[str, str, bool, str]:
    """(student, LMS id, late, what is left of the name) of a file or folder of a download.

    >>> student_of("doejane_LATE_4711_98765_lab.py")
    ('doejane', '4711', True, 'lab.py')
    >>> student_of("Jane Doe_4711_assignsubmission_file_")
    ('Jane Doe', '4711', False, '')
    >>> student_of("doe-jane")
    ('doe-jane', '', False, '')
    """
    match = _MOODLE.match(name)
    if match:
        return match["name"], match["id"], False, match["file"]
    match = _CANVAS.match(name)
    if match:
        return match["name"], match["id"], bool(match["late"]), match["file"]
    return name, "", False, ""


def collect(
    folder: str | Path, allow_helpers: bool = False, roster: list[str] | None = None
) -> list[Submission]:
    """All submissions under `folder`, sorted by student; those of `roster` that handed in nothing too.

    Understands: a folder for each student; single files ``student.py`` or ``student.zip``; Canvas downloads
    (``lastfirst_12345_67890_lab.py``, ``lastfirst_LATE_12345_67890_lab.py``); Moodle downloads (folders or files
    ``Name_12345_assignsubmission_file_…``). Names that begin with a dot are left out.

    Raises: FileNotFoundError, NotADirectoryError.
    """
    folder = Path(folder)
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder {folder}")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder; give the folder that holds the submissions")
    found: dict[tuple[str, str], Submission] = {}
    raw: dict[tuple[str, str], dict[str, _Entry]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in SKIPPED:
            continue
        is_folder = path.is_dir() and not path.is_symlink()
        student, number, late, rest = student_of(path.name)
        if (
            is_folder and rest
        ):  # only files are named like that; a folder's name may hold underscores and digits
            student, number, late = path.name, "", False
        if not rest and not is_folder:
            if path.suffix.lower() not in (".py", ".zip", ".ipynb", ".txt"):
                continue  # a list, a picture: nobody's submission
            student, rest = path.stem, "lab" + path.suffix.lower()
        key = (student, number)
        submission = found.setdefault(key, Submission(student, number))
        submission.late_flag |= late
        entries = raw.setdefault(key, {})
        if is_folder:
            for entry in _walk(path, submission):
                entries[entry.name] = entry
        else:
            entries[rest] = _Entry(rest, path)
    for key, submission in found.items():
        _sort_out(submission, raw[key], allow_helpers)
    here = {n for s in found.values() for n in (s.student, s.id)}
    spelled = {letters(s.student) for s in found.values()}
    for name in roster or []:
        if name not in here and not spellings(name) & spelled:
            missing = Submission(name)
            missing.refuse("missing", "Nothing was handed in.")
            found[(name, "")] = missing
    students: dict[str, int] = {}
    result = sorted(found.values(), key=lambda s: (s.student.casefold(), s.student, s.id))
    for submission in result:  # two people of one name stay two
        students[submission.student] = students.get(submission.student, 0) + 1
    for submission in result:
        if students[submission.student] > 1 and submission.id:
            submission.student = f"{submission.student} ({submission.id})"
    return result


def read_one(folder: str | Path, student: str, allow_helpers: bool = False) -> Submission:
    """The submission in a folder that is all one student's."""
    submission = Submission(student)
    _sort_out(submission, {e.name: e for e in _walk(Path(folder), submission)}, allow_helpers)
    return submission


def letters(name: str) -> str:
    """A name as Canvas writes it into file names: lower case, letters and digits only.

    >>> letters("Doë-Smith, Jane")
    'doesmithjane'
    """
    plain = unicodedata.normalize("NFKD", name).casefold()
    return "".join(c for c in plain if c.isalnum())


def spellings(name: str) -> set[str]:
    """The `letters` of a name as it stands, and with the family name at the other end.

    >>> sorted(spellings("Jane Doe")), sorted(spellings("Doe, Jane"))
    (['doejane', 'janedoe'], ['doejane', 'janedoe'])
    """
    last, comma, first = name.partition(",")
    if not comma:
        first, _, last = name.strip().rpartition(" ")
    return {letters(first + last), letters(last + first)}


@dataclass
class _Entry:
    """A file of a submission: on disk, or already read from a zip file."""

    name: str
    path: Path | None = None
    data: bytes | None = None

    def read(self) -> bytes:
        """Its bytes. Raises ValueError (link, device) or OSError."""
        if self.data is not None:
            return self.data
        # opened without following a link and without waiting for a pipe's other end, and looked at afterwards: what is
        # checked is what is read
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not an ordinary file")
            return file.read(MAX_ZIP + 1)


def _walk(folder: Path, submission: Submission) -> list[_Entry]:
    entries: list[_Entry] = []
    for where, folders, files in os.walk(folder, followlinks=False):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        for name in [*folders, *sorted(files)]:
            path = Path(where, name)
            if path.is_symlink() or name in files:
                if not name.startswith("."):
                    entries.append(_Entry(path.relative_to(folder).as_posix(), path))
        if len(entries) > MAX_FILES:
            submission.notes.append(f"Only the first {MAX_FILES} files were looked at.")
            return entries[:MAX_FILES]
    return entries


def _unzip(entry: _Entry, submission: Submission) -> dict[str, _Entry]:
    """The Python files in a zip file. Raises ValueError for one that can't be taken."""
    entries: dict[str, _Entry] = {}
    total = 0
    try:
        with zipfile.ZipFile(io.BytesIO(entry.read())) as archive:
            for info in archive.infolist()[: MAX_FILES * 10]:
                name = PurePosixPath(info.filename.replace("\\", "/"))
                if info.is_dir() or any(p in SKIPPED or p.startswith(".") for p in name.parts):
                    continue
                if name.is_absolute() or ".." in name.parts or name.suffix not in (".py", ".ipynb"):
                    continue
                if stat.S_ISLNK(info.external_attr >> 16):
                    raise ValueError("holds a link")
                with archive.open(info) as file:
                    data = file.read(MAX_FILE + 1)
                total += len(data)
                if total > MAX_ZIP or len(entries) >= MAX_FILES:
                    raise ValueError("holds too much")
                entries[name.as_posix()] = _Entry(name.as_posix(), data=data)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"can't be unpacked ({type(error).__name__})") from None
    submission.notes.append(f"{entry.name} was unpacked.")
    return entries


def _choose(names: list[str]) -> tuple[str | None, str]:
    """(the name that is taken for lab.py, a note). (None, why not) if none is, or more than one might be."""

    def plain(name: str) -> str:
        """lab-1.py, lab (2).py, Lab.PY: what Canvas and browsers make of lab.py."""
        return re.sub(r"(-\d+| ?\(\d+\)| - copy)?\.py$", ".py", PurePosixPath(name).name.lower())

    depth = min(
        (name.count("/") for name in names if name.endswith("/lab.py") or name == "lab.py"), default=None
    )
    if depth is not None:
        exact = [n for n in names if n.count("/") == depth and PurePosixPath(n).name == "lab.py"]
        if len(exact) == 1:
            return exact[0], "" if depth == 0 else f"lab.py was found as {exact[0]}."
        return (
            None,
            f"There is more than one lab.py ({', '.join(exact[:4])}), and no way to tell which one counts.",
        )
    near = [n for n in names if plain(n) == "lab.py"]
    if near:  # resubmissions: the highest number is the newest
        newest = max(near, key=lambda n: (int((re.findall(r"\d+", PurePosixPath(n).name) or ["0"])[-1]), n))
        return newest, f"{newest} was taken for lab.py."
    scripts = [
        n
        for n in names
        if n.lower().endswith(".py") and PurePosixPath(n).name not in RELEASED | {"solution.py"}
    ]
    if len(scripts) == 1:
        return scripts[
            0
        ], f"{scripts[0]} was taken for lab.py, being the only Python file. Hand it in as lab.py next time."
    if not scripts and any(n.endswith(".ipynb") for n in names):
        return None, "A notebook was handed in. The lab asks for a file lab.py."
    if not scripts:
        return None, "No Python file was handed in. The lab asks for a file lab.py."
    return None, f"No file is called lab.py, and it isn't clear which of {', '.join(scripts[:6])} is meant."


def _sort_out(submission: Submission, entries: dict[str, _Entry], allow_helpers: bool) -> None:
    times = [entry.path.lstat().st_mtime for entry in entries.values() if entry.path is not None]
    submission.when = max(times, default=None)
    python = {}
    for name, entry in sorted(entries.items()):
        if name.lower().endswith(".zip"):
            try:
                python.update(_unzip(entry, submission))
            except (ValueError, OSError) as error:
                submission.notes.append(f"{name} {error}, so nothing in it was looked at.")
        elif name.lower().endswith((".py", ".ipynb")):
            python[name] = entry
    if not entries:
        return submission.refuse("empty", "The folder is empty.")
    chosen, note = _choose(sorted(python))
    if chosen is None:
        return submission.refuse("misnamed", " ".join([note, *submission.notes]))
    if note:
        submission.notes.append(note)
    try:
        data = python[chosen].read()
    except ValueError as error:
        return submission.refuse("link", f"{chosen} is {error}. Hand in the file itself.")
    except OSError:
        kind = (
            "a link"
            if python[chosen].path is not None and python[chosen].path.is_symlink()
            else "no readable file"
        )
        return submission.refuse("link", f"{chosen} is {kind}. Hand in the file itself.")
    if not data.strip(b"\0 \t\r\n\xef\xbb\xbf"):
        return submission.refuse("empty", f"{chosen} is empty.")
    if len(data) > MAX_FILE:
        return submission.refuse("too-large", f"{chosen} is larger than {MAX_FILE / 1e6:g} MB.")
    text = _text(data, submission, chosen)
    if text is None:
        return None
    submission.files["lab.py"] = text
    others = [
        n for n in python if n != chosen and n.endswith(".py") and PurePosixPath(n).name not in RELEASED
    ]
    base = PurePosixPath(chosen).parent
    if allow_helpers:
        for name in others:
            try:
                inside = PurePosixPath(name).relative_to(base)
                data = python[name].read()
            except (ValueError, OSError):
                submission.notes.append(f"{name} was left out: it is a link, or not beside lab.py.")
                continue
            if (
                len(data) <= MAX_FILE
                and inside.as_posix() != "lab.py"
                and all(p.isascii() for p in inside.parts)
            ):
                submission.files[inside.as_posix()] = data
    elif others:
        submission.notes.append(f"This lab takes one file, lab.py. Not looked at: {', '.join(others[:6])}.")
    return None


def _text(data: bytes, submission: Submission, name: str) -> bytes | None:
    """`data` as UTF-8 with plain line ends, or None after `submission.refuse`. Python itself takes tabs, CRLF and a BOM,
    but not UTF-16, which some Windows editors write."""
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):
        if data.startswith(mark):
            try:
                submission.notes.append(f"{name} was saved as UTF-16 and read as such. Python wants UTF-8.")
                return data.decode(encoding).replace("\r\n", "\n").encode()
            except UnicodeDecodeError:
                break
    if b"\0" in data:
        submission.refuse("unreadable", f"{name} is no text file: it holds null bytes.")
        return None
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        where = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        submission.refuse(
            "unreadable", f"{name} is not UTF-8 text{where}. Save it as UTF-8 and hand it in again."
        )
        return None
    if encoding not in ("utf-8", "utf-8-sig"):
        return data.replace(b"\r\n", b"\n")  # it declares its encoding, and Python follows that
    return text.replace("\r\n", "\n").encode()
