"""Points and comments that a person gives: by command, from a CSV file, and what becomes of them when graded again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grader.course import CourseError
from grader.courses import batch
from grader.courses.by_hand import read_points
from grader.courses.late import gradebook
from grader.courses.nbgrader_hooks import load_result
from grader.courses.scores import Score, scores
from grader.results.result import Result
from grader.submissions.receipt import released
from tests.grader.results.conftest import APPLY, IN_TIME, RIGHT, hand_in

SLUG = "01_toy"
Grade = Callable[..., str]


def score_of(course: Path, student: str) -> Score:
    return next(one for one in scores(course, SLUG) if one.student == student)


def as_the_formgrader_sees(course: Path, student: str) -> dict[str, Any]:
    """What its API answers for the student's cells."""
    with gradebook(course, SLUG) as book:
        part = book.find_submission_notebook("toy", SLUG, student)
        found = {grade.name: grade.to_dict() for grade in part.grades}
        return found | {comment.name: comment.to_dict() for comment in part.comments}


def hand_in_again(course: Path, folder: Path, grade: Grade, student: str) -> None:
    """cyd hands in a right solution."""
    hand_in(folder, released(course, SLUG)[0], student, {"Window": RIGHT, "apply_all": APPLY}, IN_TIME)
    grade("collect", "01", str(folder), "--course", str(course))


def test_points_by_hand_from_before_a_better_submission_are_named_and_then_dropped(
    course: Path, tmp_path: Path, grade: Grade
) -> None:
    where = ("--course", str(course))
    grade("points", "01", "cyd", "check_window", "0.5", *where)
    assert score_of(course, "cyd").stale == ()
    hand_in_again(course, tmp_path / "again", grade, "cyd")
    line = "cyd: check_window: 0.5 by hand, the grader gives 2 now"
    said = grade("run", "01", "--workers", "1", *where)
    assert line in said.replace("points by hand from before the last grading: ", "")
    assert score_of(course, "cyd").total == 4.5
    assert line in grade("report", "01", "--html", str(tmp_path / "report.html"), *where)
    assert line in (tmp_path / "report.html").read_text("utf-8")
    assert "check_window: 0.5 by hand" in grade("export", "01", "-o", str(tmp_path / "grades.csv"), *where)
    assert f"{SLUG}: {line}" in grade("book", *where)

    assert "dropped" in grade("run", "01", "--drop-manual", *where)
    assert "by hand" not in grade("book", *where)
    assert (score_of(course, "cyd").total, score_of(course, "cyd").stale, score_of(course, "cyd").waits) == (
        6,
        (),
        False,
    )
    assert "by hand" not in grade("run", "01", *where)


def test_points_by_hand_can_be_kept_for_one_student(course: Path, grade: Grade) -> None:
    where = ("--course", str(course))
    for student in ("cyd", "ada"):
        grade("points", "01", student, "check_window", "0.5", *where)
    grade("run", "01", "--student", "cyd", "--student", "ada", "--workers", "1", *where)
    said = grade("run", "01", "--student", "cyd", "--keep-manual", "--workers", "1", *where)
    assert "cyd: kept: check_window: 0.5 by hand" in said
    assert (score_of(course, "cyd").total, score_of(course, "cyd").stale) == (3.5, ())
    assert len(score_of(course, "ada").stale) == 1


def test_the_formgrader_sees_points_and_comments_given_by_command(course: Path, grade: Grade) -> None:
    grade("points", "01", "cyd", "check_window", "1.5", "--comment", "Nearly.", "--course", str(course))
    found = as_the_formgrader_sees(course, "cyd")
    assert (found["check_window"]["manual_score"], found["check_window"]["needs_manual_grade"]) == (1.5, False)
    assert found["Window"]["manual_comment"] == "Nearly."
    grade("feedback", "01", "--course", str(course))
    assert "Nearly." in (course / "feedback" / "cyd" / SLUG / "toy.html").read_text("utf-8")
    grade("points", "01", "cyd", "check_window", "auto", "--course", str(course))
    assert as_the_formgrader_sees(course, "cyd")["check_window"]["manual_score"] is None


@pytest.mark.parametrize("mark", [",", ";"])
def test_a_csv_file_gives_points_to_many(course: Path, tmp_path: Path, grade: Grade, mark: str) -> None:
    rows = [["Student", "check", "points", "comment"], ["cyd", "check_window", "1", '"See\nme."'],
            ["ada", "check_len", "0", ""], ["bob", "apply_all", "", "Good."]]  # fmt: skip
    (tmp_path / "p.csv").write_text("\ufeff" + "\r\n".join(mark.join(row) for row in rows) + "\r\n", "utf-8")
    assert "3 written" in grade("points", "01", "--csv", str(tmp_path / "p.csv"), "--course", str(course))
    assert as_the_formgrader_sees(course, "cyd")["Window"]["manual_comment"] == "See\nme."
    assert score_of(course, "ada").total == 5
    assert as_the_formgrader_sees(course, "bob")["apply_all"]["manual_comment"] == "Good."


def test_points_of_a_spreadsheet_with_decimal_commas_are_read(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("student;check;points\ncyd;check_window;0,5\nada;check_len;1,25\n", "utf-8")
    assert [one.points for one in read_points(tmp_path / "p.csv")] == [0.5, 1.25]
    (tmp_path / "p.csv").write_text("student;check;points\ncyd;check_window;1,000\n", "utf-8")
    with pytest.raises(CourseError, match="found '1,000'"):  # a thousand, or one
        read_points(tmp_path / "p.csv")


def test_run_says_who_has_fewer_points_than_at_the_last_grading(
    course: Path, grade: Grade, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = [Result(lab=SLUG, points=6.0, student=student) for student in ("ada", "fay")]
    had = load_result(course, SLUG, "ada").earned
    assert had > 0 == load_result(course, SLUG, "fay").earned
    monkeypatch.setattr(batch, "plan", lambda *_: batch.Plan(examine=["ada", "fay"]))
    monkeypatch.setattr(batch, "grade_students", lambda *_, **__: (one for one in worse))
    said = grade("run", "01", "--course", str(course))
    assert f"Fewer points than at the last grading (1): ada: 0, was {had:g}" in said


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("cyd,check_windo,1", "there is no check 'check_windo'; checks: check_calls, check_len, check_window"),
        ("cyd,check_window,3", "3 points, and there are 2"),
        ("cyd,check_window,nan", "expected points, a number from 0, or 'auto', found 'nan'"),
        ("zoe,check_window,1", "'zoe' has handed in nothing that is graded"),
        ("cyd,check_window,", "neither points nor a comment"),
    ],
)
def test_a_wrong_row_is_named_and_nothing_is_written(
    course: Path, tmp_path: Path, grade: Grade, row: str, said: str
) -> None:
    (tmp_path / "p.csv").write_text(f"student,check,points\nada,check_len,0\n{row}\n", "utf-8")
    assert said in grade("points", "01", "--csv", str(tmp_path / "p.csv"), "--course", str(course), ok=False)
    assert score_of(course, "ada").total == 6


def test_one_student_is_graded_again_and_nobody_else(course: Path, grade: Grade) -> None:
    times = {path.name: path.stat().st_mtime_ns for path in (course / "results" / SLUG).glob("*.json")}
    assert "1 graded" in grade("run", "01", "--student", "cyd", "--workers", "1", "--course", str(course))
    assert "1 graded again" in grade("regrade", "01", "--student", "cyd", "--workers", "1", "--course", str(course))
    changed = {path.name for path in (course / "results" / SLUG).glob("*.json")
               if path.stat().st_mtime_ns != times[path.name]}  # fmt: skip
    assert changed == {"cyd.json"}
    assert "nobody handed in nothing" in grade("run", "01", "--student", "nobody", "--course", str(course), ok=False)
    assert json.loads((course / "results" / SLUG / "cyd.json").read_text())["earned"] == 3
