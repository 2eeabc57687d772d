"""Submissions as LMSs, browsers and people name them."""

from __future__ import annotations

import doctest
import os

import pytest

from manyranks.grading import canvas, collect, late


@pytest.mark.parametrize("module", [collect, canvas, late])
def test_examples(module):
    assert doctest.testmod(module).failed == 0


def write(folder, **files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_canvas_download(tmp_path):
    write(
        tmp_path,
        **{
            "doejane_LATE_4711_99_lab.py": "late = 1",
            "roerich_4712_100_lab-2.py": "second = 1",
            "smith_4713_101_handin.txt": "no",
            "smith_4714_102_lab.py": "another smith = 1",
        },
    )
    found = {s.student: s for s in collect.collect(tmp_path)}
    assert found["doejane"].late_flag and found["doejane"].id == "4711"
    assert found["roerich"].files["lab.py"] == b"second = 1"
    assert set(found) == {"doejane", "roerich", "smith (4713)", "smith (4714)"}  # two people stay two
    assert found["smith (4713)"].kind == "misnamed"


def test_a_resubmission_in_canvas_is_one_student(tmp_path):
    write(tmp_path, **{"roe_12_100_lab.py": "old = 1", "roe_12_140_lab-1.py": "new = 1"})
    (only,) = collect.collect(tmp_path)
    assert only.id == "12" and list(only.files) == ["lab.py"]


def test_moodle_downloads(tmp_path):
    write(
        tmp_path,
        **{
            "Jane Doe_31_assignsubmission_file_/lab.py": "a = 1",
            "Ann_Lee_32_assignsubmission_file_lab.py": "b = 1",
        },
    )
    found = {s.student: s for s in collect.collect(tmp_path)}
    assert set(found) == {"Jane Doe", "Ann_Lee"}
    assert found["Ann_Lee"].id == "32" and found["Ann_Lee"].files["lab.py"] == b"b = 1"


def test_a_folder_of_digits_and_underscores_is_a_name(tmp_path):
    write(tmp_path, **{"team_1_2_blue/lab.py": "a = 1", "team_1_3_red/lab.py": "b = 1"})
    assert [(s.student, s.id) for s in collect.collect(tmp_path)] == [
        ("team_1_2_blue", ""),
        ("team_1_3_red", ""),
    ]


def test_single_files_and_what_is_nobodys(tmp_path):
    write(tmp_path, **{"doe.py": "a = 1", "roster.csv": "doe", ".hidden/lab.py": "", "__MACOSX/lab.py": ""})
    assert [s.student for s in collect.collect(tmp_path)] == ["doe"]


def test_helpers_come_along_where_the_lab_allows(tmp_path):
    write(
        tmp_path,
        **{
            "doe/hw/lab.py": "import util",
            "doe/hw/util.py": "x = 1",
            "doe/hw/sub/deep.py": "y = 1",
            "doe/test_lab.py": "",
        },
    )
    (one,) = collect.collect(tmp_path, allow_helpers=True)
    assert set(one.files) == {"lab.py", "util.py", "sub/deep.py"}
    (one,) = collect.collect(tmp_path)
    assert set(one.files) == {"lab.py"} and "util.py" in " ".join(one.notes)


def test_links_do_not_lead_out(tmp_path):
    (tmp_path / "secret.py").write_text("key = 1")
    folder = tmp_path / "in"
    write(folder, **{"doe/lab.py": "import helper"})
    os.symlink(tmp_path / "secret.py", folder / "doe" / "helper.py")
    os.symlink(tmp_path, folder / "doe" / "everything")
    (one,) = collect.collect(folder, allow_helpers=True)
    assert set(one.files) == {"lab.py"}


def test_the_digest_follows_the_bytes(tmp_path):
    write(tmp_path, **{"doe/lab.py": "a = 1"})
    first = collect.collect(tmp_path)[0].digest()
    os.utime(tmp_path / "doe" / "lab.py", (1, 1))
    assert collect.collect(tmp_path)[0].digest() == first
    write(tmp_path, **{"doe/lab.py": "a = 2"})
    assert collect.collect(tmp_path)[0].digest() != first


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        collect.collect(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        collect.collect(tmp_path / "file")


def test_a_roster_by_name_or_number(tmp_path):
    write(tmp_path, **{"doe_12_1_lab.py": "a = 1"})
    found = collect.collect(tmp_path, roster=["12", "roe"])
    assert [(s.student, s.kind) for s in found] == [("doe", "ok"), ("roe", "missing")]


@pytest.mark.parametrize("name", ["Jane Doë", "Doë, Jane", "doejane", "DOE JANE"])
def test_a_roster_may_write_a_name_as_people_do(tmp_path, name):
    write(tmp_path, **{"doejane_12_1_lab.py": "a = 1"})
    found = collect.collect(tmp_path, roster=[name, "Jane Roe"])
    assert [(s.student, s.kind) for s in found] == [("doejane", "ok"), ("Jane Roe", "missing")]
