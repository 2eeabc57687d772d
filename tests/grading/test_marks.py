"""Late policies, the marks' table, Canvas's gradebook, and the pages: from results alone, without a sandbox."""

from __future__ import annotations

import csv
import io
import re
from xml.etree import ElementTree

import pytest

from manyranks.grading import canvas
from manyranks.grading.batch import Outcome, Result
from manyranks.grading.feedback import feedback_name, feedback_page
from manyranks.grading.lab import Plan, Test
from manyranks.grading.late import Dates, LateError, Policy
from manyranks.grading.marks import make_marks, marks_csv
from manyranks.grading.report import class_report

PLAN = Plan([Test("test_lab.py::test_a", 60, "A is so."), Test("test_grading.py::test_b", 40, "B is so.")])
HOUR, DAY = 3600, 86400


def result(student: str, a: bool = True, b: bool = True, **more) -> Result:
    outcomes = [
        Outcome("test_lab.py::test_a", 60, a, "" if a else "expected 1, got 2"),
        Outcome("test_grading.py::test_b", 40, b, "" if b else "expected 3"),
    ]
    return Result(student, outcomes=outcomes, **more)


def marks(*results, policy="none", dates=None):
    return make_marks(results, PLAN, Policy.parse(policy), dates or Dates())


# ---------------------------------------------------------------------------------------------------- late


def test_a_policy_by_hand():
    policy = Policy.parse("10%/day, max 50%, grace 15min")
    late = {0: 1.0, 15 * 60: 1.0, 16 * 60: 0.9, DAY: 0.9, DAY + 1: 0.8, 4.5 * DAY: 0.5, 400 * DAY: 0.5}
    assert {seconds: policy.factor(seconds) for seconds in late} == late
    assert Policy.parse("5% / 12 hours").factor(25 * HOUR) == 0.85
    assert Policy.parse("zero").factor(1) == 0 and Policy.parse("none").factor(10**9) == 1


@pytest.mark.parametrize(
    "text", ["10", "max 50%", "10%/fortnight", "200%/day", "10%/day,free on Mondays", "10%/0day"]
)
def test_a_policy_that_makes_no_sense(text):
    with pytest.raises(LateError):
        Policy.parse(text)


def test_times_from_a_table_with_an_extension(tmp_path):
    table = tmp_path / "times.csv"
    table.write_text(
        "Student,Submitted,Due\nann,2026-03-02T12:00Z,\n4711,2026-03-04T12:00Z,2026-03-05T00:00Z\n"
    )
    dates = Dates("2026-03-01T00:00+00:00", table)
    assert dates.seconds_late("ann", "", None) == 36 * HOUR
    assert dates.seconds_late("bob", "4711", None) == 0  # has an extension
    assert dates.seconds_late("cleo", "", 0) == 0  # the file's own time
    assert dates.seconds_late("cleo", "", 1772323200 + HOUR) == HOUR
    table.write_text("who,when\n")
    with pytest.raises(LateError, match="student"):
        Dates(None, table)
    with pytest.raises(LateError, match="31st"):
        Dates("31st of May")


def test_a_penalty_is_computed_anew():
    dates = Dates("2026-03-01T00:00+00:00")
    one = result("ann", when=1772323200 + DAY)
    (late,) = marks(one, policy="10%/day", dates=dates)
    assert (late.mark, late.status) == (90, "late")
    (later,) = marks(one, policy="20%/day", dates=dates)  # the same result under another policy
    assert later.mark == 80 and one.points == 100


# ---------------------------------------------------------------------------------------------------- the table


def test_the_table_is_sorted_and_stable():
    some = [
        result("zoe"),
        result("Ann", b=False),
        result("bob", kind="missing", problem="Nothing was handed in."),
    ]
    text = marks_csv(marks(*some))
    assert text == marks_csv(marks(*reversed(some)))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [r["student"] for r in rows] == ["Ann", "bob", "zoe"]
    assert rows[0]["mark"] == "60" and rows[0]["failed_tests"] == "test_b"


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_no_cell_is_a_formula(name):
    row = list(csv.reader(io.StringIO(marks_csv(marks(result(name, notes=[name]))))))[1]
    assert row[0] == "'" + name and row[-1] == "'" + name


def test_a_failure_of_the_grader_is_no_zero():
    (mark,) = marks(result("ann", kind="grader", problem="The grader's sandbox failed."))
    row = list(csv.DictReader(io.StringIO(marks_csv([mark]))))[0]
    assert row["mark"] == "" and row["status"] == "grader"


# ---------------------------------------------------------------------------------------------------- Canvas

EXPORT = (
    '\ufeffStudent,ID,SIS User ID,SIS Login ID,Section,Lab 0 (900),A little lab (901),"Total, all",Notes\r\n'
    "    Points Possible,,,,,10,50,(read only),\r\n"
    '"Doe, Jane",4711,s1,jdoe,"Sec 1, and 2",7,,70,"keep ""this"""\r\n'
    '"Roe, Rich",4712,s2,rroe,Sec 1,,,,\r\n'
    '"Lee, Ann",4713,s3,alee,Sec 1,1,33,,\r\n'
    '"Lee, Ann",4714,s4,alee2,Sec 2,,,,\r\n'
    '"Student, Test",99,,abcdef,Sec 1,,,,\r\n'
)


def test_canvas_by_number_login_and_name():
    some = marks(
        result("doejane", id="4711", b=False),
        result("Rich Roe"),
        result("alee2"),
        result("stranger"),
        result("Ann Lee"),
    )
    filled = canvas.fill(EXPORT, some, "A little lab", 100)
    rows = list(csv.reader(io.StringIO(filled.text.removeprefix("\ufeff"))))
    before = list(csv.reader(io.StringIO(EXPORT.removeprefix("\ufeff"))))
    assert [r[6] for r in rows] == [
        "A little lab (901)",
        "50",
        "30",
        "50",
        "33",
        "50",
        "",
    ]  # scaled to 50 points
    assert [r[:6] + r[7:] for r in rows] == [r[:6] + r[7:] for r in before]  # nothing else has changed
    assert filled.text.startswith("\ufeff") and "\r\n" in filled.text
    assert filled.unmatched_submissions == ["stranger", "Ann Lee"]  # two are called so
    assert filled.students_without == ["Lee, Ann", "Student, Test"]
    assert any("multiplied by 0.5" in line for line in filled.report())


def test_canvas_a_name_of_the_roster_takes_nobodys_mark():
    """The roster calls Doe, Jane missing, the download calls her doejane: what she handed in counts."""
    some = marks(
        result("Doe, Jane", kind="missing", problem="Nothing was handed in."), result("doejane", id="4711")
    )
    filled = canvas.fill(EXPORT, some, "A little lab", 100)
    rows = list(csv.reader(io.StringIO(filled.text.removeprefix("\ufeff"))))
    assert [r[6] for r in rows if r[1] == "4711"] == ["50"] and filled.unmatched_submissions == []


def test_canvas_points_possible_is_filled_in_where_it_is_blank():
    export = EXPORT.replace("10,50,(read only)", "10,,(read only)")
    filled = canvas.fill(export, marks(result("x", id="4712")), "901", 100)
    rows = list(csv.reader(io.StringIO(filled.text)))
    assert rows[1][6] == "100" and rows[3][6] == "100"


def test_canvas_leaves_out_who_was_not_graded():
    filled = canvas.fill(
        EXPORT, marks(result("x", id="4713", kind="grader", problem="failed")), "A little lab", 50
    )
    assert "33" in filled.text and filled.not_graded == ["x"] and filled.filled == 0


@pytest.mark.parametrize("wanted", ["Lab 7", "Student", "Total, all"])
def test_canvas_without_the_column(wanted):
    with pytest.raises(canvas.CanvasError, match=r"A little lab \(901\)"):
        canvas.fill(EXPORT, [], wanted, 100)
    with pytest.raises(canvas.CanvasError, match="no gradebook"):
        canvas.fill("name,mark\n", [], "A little lab", 100)


# ---------------------------------------------------------------------------------------------------- pages

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e"


def whole(page: str) -> ElementTree.Element:
    """The page as a tree: every tag is closed, every text escaped."""
    text = page.replace("<!DOCTYPE html>\n", "")
    text = re.sub(r"<(meta[^>]*)>", r"<\1/>", text)
    return ElementTree.fromstring(text)


def test_the_feedback_page_tells_what_to_do():
    (mark,) = marks(result("Jane Doe", a=False), policy="10%/day", dates=Dates("2026-03-01T00:00Z"))
    page = feedback_page(mark, PLAN, "A little lab")
    assert "Mark: 40 of 100" in page and "expected 1, got 2" in page
    assert "pytest test_lab.py -k test_a -v" in page
    whole(page)


def test_a_hidden_test_is_not_offered_for_running():
    (mark,) = marks(result("Jane Doe", b=False))
    page = feedback_page(mark, PLAN, "A little lab")
    assert "only run when the lab is graded" in page and "-k test_b" not in page


def test_no_string_of_a_student_is_markup():
    one = result(HOSTILE, a=False, notes=[HOSTILE], id="1")
    one.outcomes[0].message = one.outcomes[0].where = one.outcomes[0].output = HOSTILE
    (mark,) = marks(one)
    for page in (feedback_page(mark, PLAN, "A little lab"), class_report([mark], PLAN, "A little lab")):
        assert "<script" not in page and "\x1b" not in page and "\u202e" not in page
        tree = whole(page)
        assert not tree.findall(".//script")
        assert "default-src 'none'" in page
    assert re.fullmatch(r"[A-Za-z0-9-]+\.html", feedback_name(mark))


def test_pages_need_nothing_else_and_work_in_light_and_dark():
    some = marks(
        result("a"), result("b", b=False), result("c", kind="missing", problem="Nothing was handed in.")
    )
    for page in (feedback_page(some[0], PLAN, "A little lab"), class_report(some, PLAN, "A little lab")):
        assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
        assert "prefers-color-scheme: dark" in page and '<html lang="en">' in page
        assert page.count("<h1>") == 1


def test_the_report_counts_failures_in_text_and_as_a_plot():
    some = marks(
        result("a"),
        result("b", b=False),
        result("c", b=False),
        result("d", kind="missing", problem="Nothing."),
    )
    page = class_report(some, PLAN, "A little lab")
    tree = whole(page)
    svg = "{http://www.w3.org/2000/svg}"
    plots = tree.findall(f".//{svg}svg")
    assert len(plots) == 2 and all(p.get("role") == "img" and p.find(f"{svg}title").text for p in plots)
    texts = [t.text for t in plots[1].iter(f"{svg}text")]
    assert texts[:2] == ["test_b", "2 (67%)"]  # the missing one is not counted
    assert "median 60" in page and "1 missing" in page


def test_identical_files_are_pointed_out():
    some = marks(result("a", file="f" * 64), result("b", file="f" * 64), result("c", file="e" * 64))
    assert "a, b</li>" in class_report(some, PLAN, "A little lab")
