"""Regrading after a test was fixed: what changed for whom. And forgetting: all that it says is deleted, no more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from grader.courses.forget import Kept, kept, to_forget

pytestmark = pytest.mark.usefixtures("warm_examiners")

SLUG = "01_toy"
SOURCE = Path(__file__).parents[1] / "toy_lab" / "solutions" / SLUG / "toy.py"


def release_with_stricter_calls(course: Path, folder: Path, grade: Callable[..., str]) -> None:
    """A new solution notebook: check_len now wants nothing of a full window, so keeping every vector passes it."""
    (folder / SLUG).mkdir(parents=True)
    text = SOURCE.read_text()
    changed = text.replace("assert len(w) == 2, f", "assert len(w) >= 2, f")
    assert changed != text
    (folder / SLUG / "toy.py").write_text(changed)
    grade("release", "01", "--course", str(course), "--sources", str(folder))


def results(course: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in (course / "results" / SLUG).glob("*.json")}


def book_scores(course: Path) -> dict[str, float]:
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        return {submission.student_id: submission.score for submission in book.find_assignment(SLUG).submissions}


def set_by_hand(course: Path, student: str, check: str, points: float) -> None:
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        book.find_grade(check, "toy", SLUG, student).manual_score = points
        book.db.commit()


def test_a_dry_run_says_what_would_change_and_changes_nothing(
    course: Path, tmp_path: Path, grade: Callable[..., str]
) -> None:
    release_with_stricter_calls(course, tmp_path / "new", grade)
    before, elsewhere = results(course), (course / "gradebook.db").rename(tmp_path / "elsewhere.db")
    with (course / "nbgrader_config.py").open("a") as config:
        config.write(f"c.CourseDirectory.db_url = 'sqlite:///{elsewhere}'\n")
    book = elsewhere.read_bytes()
    said = grade("regrade", "01", "--dry-run", "--workers", "1", "--course", str(course))
    assert "cyd │ 3 → 4" in said
    assert "check_len: gained by 2 students, lost by 0" in said
    assert "9 graded again, 2 changed. Nothing was recorded." in said
    assert results(course) == before
    assert elsewhere.read_bytes() == book
    assert not (course / "gradebook.db").exists()
    assert not (course / "results" / SLUG / "history").exists()


def test_a_regrade_records_the_new_points_and_keeps_old_results_and_manual_points(
    course: Path, tmp_path: Path, grade: Callable[..., str]
) -> None:
    set_by_hand(course, "cyd", "check_window", 1.5)
    release_with_stricter_calls(course, tmp_path / "new", grade)
    before = results(course)
    said = grade("regrade", "01", "--workers", "1", "--course", str(course))
    assert "cyd │ 3 → 4 │ 4.5 → 5.5 │ check_len: failed → passed" in said
    assert "ada" not in said
    assert book_scores(course)["cyd"] == 5.5
    assert book_scores(course)["eve"] == 4
    history = course / "results" / SLUG / "history"
    assert {path.stem: path.read_text() for path in history.glob("*/*.json")} == before
    again = grade("regrade", "01", "--workers", "1", "--course", str(course))
    assert "9 graded again, 0 changed" in again
    assert len(list(history.iterdir())) == 2


def test_regrading_what_was_never_graded_says_what_to_do_first(
    released_course: Callable[[Path], Path], tmp_path: Path, grade: Callable[..., str]
) -> None:
    course = released_course(tmp_path / "course")
    assert "inferlab grade run 01_toy" in grade("regrade", "01", "--course", str(course), ok=False)


def files_of(course: Path, student: str) -> list[Path]:
    return [path for path in course.rglob("*") if path.stem == student or student in path.relative_to(course).parts]


def test_forgetting_says_what_it_would_delete_and_deletes_nothing_without_yes(
    course: Path, grade: Callable[..., str]
) -> None:
    said = grade("forget", "--student", "cyd", "--course", str(course))
    assert "received/cyd" in said
    assert "results/01_toy/cyd.json" in said
    assert "gradebook: 01_toy" in said
    assert "1 student would be deleted; add --yes" in said
    assert files_of(course, "cyd")
    assert "cyd" in book_scores(course)


def test_forgetting_deletes_every_trace_of_that_student_and_of_no_other(
    course: Path, grade: Callable[..., str]
) -> None:
    at = ("--course", str(course))
    grade("feedback", "01", *at)
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *at)
    grade("extend", "cyd", "01", "3", *at)
    grade("extend", "eve", "01", "3", *at)
    history = course / "results" / SLUG / "history" / "2026-03-02"
    shutil.copytree(course / "results" / SLUG, history)
    others = {path for path in course.rglob("*") if path not in files_of(course, "cyd") and path.suffix != ".db"}
    grade("forget", "--student", "cyd", "--yes", *at)
    assert files_of(course, "cyd") == []
    assert "cyd" not in (course / "late.yaml").read_text()
    assert "eve: 3" in (course / "late.yaml").read_text()
    assert "cyd" not in book_scores(course)
    assert "cyd" not in (course / "results" / SLUG / "recorded.log").read_text()
    assert {path for path in others if path.exists()} == others
    assert set(results(course)) == {"ada", "bob", "dan", "eve", "fay", "gus", "hal", "mal"}
    assert b"cyd" not in (course / "gradebook.db").read_bytes()


def test_forgetting_takes_a_student_out_of_the_roster_too(course: Path, grade: Callable[..., str]) -> None:
    assert "Zander" in (course / "roster.json").read_text()
    grade("forget", "--student", "zoe", "--student", "ada", "--yes", "--course", str(course))
    left = (course / "roster.json").read_text()
    assert "Zander" not in left
    assert "oneil" not in left
    assert "HYPERLINK" in left


def test_only_what_is_old_enough_is_forgotten() -> None:
    now = datetime(2027, 1, 1, tzinfo=UTC)
    last = {"old": now - timedelta(days=366), "new": now - timedelta(days=364), "unknown": None}
    everything = [Kept(name, (), (), True, when) for name, when in last.items()]
    assert [one.student for one in to_forget(everything, [], 365, now)] == ["old"]
    assert [one.student for one in to_forget(everything, ["unknown"], None, now)] == ["unknown"]


def test_an_unknown_student_and_nobody_at_all_are_refused(course: Path, grade: Callable[..., str]) -> None:
    assert "nothing is kept of nobody" in grade("forget", "--student", "nobody", "--course", str(course), ok=False)
    assert "--student ID or --older-than DAYS" in grade("forget", "--course", str(course), ok=False)


def test_a_link_in_the_course_is_never_followed_when_forgetting(
    course: Path, tmp_path: Path, grade: Callable[..., str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.txt").write_text("keep me")
    shutil.rmtree(course / "received" / "cyd")
    (course / "received" / "cyd").symlink_to(outside)
    grade("forget", "--student", "cyd", "--yes", "--course", str(course))
    assert (outside / "precious.txt").read_text() == "keep me"


def test_the_record_of_what_is_kept_knows_when_it_came_in(course: Path) -> None:
    found = {one.student: one for one in kept(course)}
    assert found["zoe"].last is None
    assert found["zoe"].in_gradebook
    last = found["ada"].last
    assert last is not None
    assert last > datetime(2026, 3, 1, tzinfo=UTC)
    assert json.loads((course / "results" / SLUG / "ada.json").read_text())["student"] == "ada"
