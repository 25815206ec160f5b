"""Exports: what each system needs stands where it looks for it, and nothing of a student's text can do harm there."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.courses.scores import Score, scores
from grader.reports.book import Book, Row, book_csv
from grader.reports.export import canvas_csv, gradebook_csv, gradescope_json, moodle_csv, pseudonym
from grader.results.result import NO_CELLS, CheckResult, Result

SLUG = "01_toy"
FORMULA = tuple("=+-@\t\r|%")


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.fixture(scope="module")
def changed_course(graded_course: Path, tmp_path_factory: pytest.TempPathFactory, grade: Callable[..., str]) -> Path:
    """The course after a manual change for cyd (1 of 2 points for check_window) and a penalty for eve, who is late."""
    from nbgrader.api import Gradebook

    course = Path(shutil.copytree(graded_course, tmp_path_factory.mktemp("changed") / "course"))
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", "--course", str(course))
    grade("late", "01", "--per-day", "0.1", "--course", str(course))
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        book.find_grade("check_window", "toy", SLUG, "cyd").manual_score = 1.0
        book.find_comment("Window", "toy", SLUG, "cyd").manual_comment = "=1+1 <b>Anna</b>, look at\nthe last line"
        book.db.commit()
    return course


@pytest.fixture
def exported(changed_course: Path, tmp_path: Path, grade: Callable[..., str]) -> Callable[..., Any]:
    def run(form: str, *options: str) -> str:
        grade("export", "01", "--format", form, "-o", str(tmp_path / form), "--course", str(changed_course), *options)
        return (tmp_path / form).read_bytes().decode("utf-8") if (tmp_path / form).is_file() else ""

    return run


def test_the_gradebook_csv_has_every_student_with_what_counts(exported: Callable[..., str]) -> None:
    rows = {row["student"]: row for row in table(exported("csv"))}
    assert set(rows) == {"ada", "bob", "cyd", "dan", "eve", "fay", "gus", "hal", "mal", "zoe"}
    assert (rows["ada"]["total"], rows["ada"]["last_name"], rows["ada"]["max_score"]) == ("6", 'O"Neil, Jr', "6")
    assert (rows["cyd"]["total"], rows["cyd"]["check_window"]) == ("4", "1")
    assert (rows["eve"]["score"], rows["eve"]["late_penalty"], rows["eve"]["total"]) == ("3", "1.2", "1.8")
    assert (rows["hal"]["status"], rows["hal"]["total"]) == ("refused", "0")
    assert (rows["zoe"]["status"], rows["zoe"]["total"]) == ("not graded", "")
    assert rows["ada"]["submitted_utc"] == "2026-03-01 12:00:00"
    assert rows["bob"]["first_name"].startswith("'=")
    assert rows["bob"]["email"] == "'+bob@example.org"


def test_canvas_finds_its_columns_its_points_row_and_its_students(exported: Callable[..., str]) -> None:
    # The conditions are those of lib/gradebook_importer.rb: header?, update_column_count, check_for_non_student_row.
    rows = list(csv.reader(io.StringIO(exported("canvas", "--column", "Lab 01 (99)"), newline="")))
    head = rows[0]
    assert "Student" in head[0]
    assert "ID" in head[1]
    assert head[2:] == ["SIS User ID", "SIS Login ID", "Section", "Lab 01 (99)"]
    assert "Points Possible" in rows[1][0]
    assert rows[1][5] == "6"
    by_login = {row[3]: row for row in rows[2:]}
    assert by_login["eve"] == ["eve", "", "eve", "eve", "", "1.8"]
    assert by_login["oneil"] == ['O"Neil, Jr, Ada', "4711", "S-9", "oneil", "A1", "6"]
    assert by_login["zoe"][5] == ""
    assert {len(row) for row in rows} == {6}


def test_moodle_finds_identifier_grade_and_comments(exported: Callable[..., str]) -> None:
    text = exported("moodle")
    rows = {row["ID number"]: row for row in table(text)}
    assert (rows["ada"]["Identifier"], rows["ada"]["Grade"]) == ("Participant 77", "6")
    assert (rows["ada"]["Email address"], rows["ada"]["Maximum Grade"]) == ("ada@example.org", "6")
    assert rows["dan"]["Identifier"] == ""
    assert "Last modified (grade)" in rows["ada"]
    said = rows["cyd"]["Feedback comments"]
    assert "check_len: failed." in said
    assert "&lt;b&gt;Anna&lt;/b&gt;" in said
    assert "<script" not in text
    assert "alert(1)" not in text  # nothing that a learner's code wrote


def test_gradescope_gets_one_results_file_per_student(exported: Callable[..., str], tmp_path: Path) -> None:
    exported("gradescope")
    files = {
        path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "gradescope").glob("*/results.json")
    }
    assert "zoe" not in files
    assert files["cyd"]["score"] == 4
    assert files["eve"]["score"] == pytest.approx(1.8)
    assert "1.2 points taken off" in files["eve"]["output"]
    tests = {test["name"].split(":")[0]: test for test in files["cyd"]["tests"]}
    assert (tests["check_window"]["score"], tests["check_window"]["max_score"]) == (1, 2)
    assert tests["check_window"]["status"] == "failed"
    assert tests["check_calls"]["status"] == "passed"
    allowed = {"score", "execution_time", "output", "output_format", "test_output_format", "test_name_format",
               "visibility", "stdout_visibility", "tests"}  # fmt: skip
    for data in files.values():
        assert set(data) == allowed
        for test in data["tests"]:
            assert set(test) <= {"number", "name", "score", "max_score", "status", "output", "visibility"}
            assert test["visibility"] in ("visible", "hidden", "after_due_date", "after_published")
            assert test["status"] in ("passed", "failed")


@pytest.mark.parametrize("form", ["csv", "canvas", "moodle", "gradescope"])
def test_an_anonymous_export_holds_no_name_no_id_and_no_free_text(
    exported: Callable[..., str], tmp_path: Path, form: str
) -> None:
    text = exported(form, "--anonymous")
    text += "".join(f"{path.parent.name} {path.read_text()}" for path in (tmp_path / form).glob("*/*.json"))
    assert text.count("student-") >= 9
    for known in (
        "ada",
        "Ada",
        "O'Neil",
        "4711",
        "S-9",
        "oneil",
        "example.org",
        "Zo",
        "HYPERLINK",
        "Anna",
        "alert",
        "mal",
        "12:00",
    ):
        assert known not in text.replace("formal", "")


def test_a_pseudonym_is_stable_in_a_course_and_different_in_another(
    graded_course: Path, tmp_path: Path, grade: Callable[..., str]
) -> None:
    grade("new-course", str(tmp_path / "other"))
    assert pseudonym(graded_course, "ada") == pseudonym(graded_course, "ada")
    others = {pseudonym(graded_course, "ada"), pseudonym(graded_course, "bob"), pseudonym(tmp_path / "other", "ada")}
    assert len(others) == 3


def test_moodles_number_of_this_lab_is_taken_from_the_download(course: Path, grade: Callable[..., str]) -> None:
    path = course / "received" / "dan" / SLUG / "received.json"
    history = json.loads(path.read_text())
    history[-1] |= {"form": "moodle", "path": "Dan Doe_4242_assignsubmission_file/toy.ipynb"}
    path.write_text(json.dumps(history))
    found = {score.student: score for score in scores(course, SLUG)}
    assert found["dan"].ids == {"participant": "4242"}
    rows = {row["ID number"]: row for row in table(moodle_csv([found["dan"]], {}))}
    assert rows["dan"]["Identifier"] == "Participant 4242"


def test_canvas_columns_can_be_read_back_as_a_roster(exported: Callable[..., str], tmp_path: Path) -> None:
    from grader.submissions.roster import Roster
    from grader.submissions.roster_file import import_roster

    (tmp_path / "canvas.csv").write_text(exported("canvas"))
    roster = Roster()
    import_roster(tmp_path / "canvas.csv", roster)
    assert roster.students["oneil"].ids == {
        "canvas_id": "4711",
        "sis_user_id": "S-9",
        "login": "oneil",
        "section": "A1",
    }
    assert len(roster.students) == 10


def person(text: str) -> tuple[Score, Result]:
    check = CheckResult("check", 1, 1, "failed", text, text, text, text)
    ids = dict.fromkeys(("canvas_id", "sis_user_id", "login", "section", "participant", "id_number"), text)
    score = Score(text, text, text, text, 2.0, ids, 1.5, cells={"check": -0.5, text: 1}, comments=(text,))
    return score, Result("lab", 2, checks=[check], student=text)


@given(st.text() | st.sampled_from(FORMULA).flatmap(lambda sign: st.text().map(lambda text: sign + text)))
def test_no_cell_of_any_export_is_a_formula_and_every_row_has_its_cells(text: str) -> None:
    score, result = person(text)
    for made in (gradebook_csv("lab", [score], {text: result}), canvas_csv(text, [score]),
                 moodle_csv([score], {text: result})):  # fmt: skip
        rows = list(csv.reader(io.StringIO(made, newline="")))
        assert len({len(row) for row in rows}) == 1
        for cell in (cell for row in rows for cell in row):
            assert not cell.lstrip().startswith(FORMULA) or cell == "-" or re.fullmatch(r"-[0-9.]+", cell)
    assert json.loads(gradescope_json(score, result))["score"] == 1.5


SEPARATED = ["Ann;=1+1", "Ann\t=1+1", "Ann\n=1+1", "Ann; @SUM(1)", 'Ann;"=1+1;x', "Ann;\n\t+1", "Ann\r\n-1", 'Ann;""|x']


@pytest.mark.parametrize("text", SEPARATED)
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_no_part_of_a_name_is_a_formula_where_a_spreadsheet_parts_cells_by_another_sign(
    text: str, delimiter: str
) -> None:
    score, result = person(text)
    whole = book_csv(Book({"01": 2.0}, [Row("ada", text, {"01": 1.0})]))
    moodle = moodle_csv([score], {})  # without what the grader says, which is no student's
    for made in (gradebook_csv("lab", [score], {text: result}), canvas_csv(text, [score]), moodle, whole):
        for cell in (cell for row in csv.reader(io.StringIO(made, newline=""), delimiter=delimiter) for cell in row):
            assert not cell.lstrip().startswith(FORMULA) or cell == "-" or re.fullmatch(r"-[0-9.]+", cell)


def test_what_the_grader_says_reaches_moodle_as_it_is_written() -> None:
    score, _ = person("ada")
    check = CheckResult("check", 1, 0, "failed", "a count is <=5; -1 is none", "", "")
    assert "a count is &lt;=5; -1 is none" in moodle_csv([score], {"ada": Result("lab", 1, checks=[check])})


def test_moodle_says_why_nothing_of_a_submission_was_graded() -> None:
    score, _ = person("ada")
    check = CheckResult("check", 1, 0, "refused", "a property", "the file ends in the middle", "a hint")
    text = moodle_csv([score], {"ada": Result("lab", 1, checks=[check])})
    assert "Nothing was graded: your file could not be read: the file ends in the middle" in text
    assert "a hint" not in text
    wrong = Result("lab", 1, checks=[CheckResult("check", 1, 0, "not written", "a property")], notes=[NO_CELLS])
    assert "hand in the notebook of this lab" in moodle_csv([score], {"ada": wrong})
    wrong.checks.append(CheckResult("other", 1, 1, "passed", ""))
    assert "hand in the notebook of this lab" not in moodle_csv([score], {"ada": wrong})


def test_an_unknown_format_and_a_missing_folder_say_what_is_expected(
    graded_course: Path, grade: Callable[..., str]
) -> None:
    said = grade("export", "01", "--format", "excel", "--course", str(graded_course), ok=False)
    assert "csv, canvas, moodle, gradescope" in said
    assert "name a folder" in grade("export", "01", "--format", "gradescope", "--course", str(graded_course), ok=False)
