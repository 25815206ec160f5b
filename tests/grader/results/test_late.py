"""Due dates, time zones, extensions, penalties: in the arithmetic, in the gradebook, and by the commands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.course import CourseError
from grader.courses import late
from grader.courses.late import Policy, add_days, days_late, parse_when, read_policy, write_policy
from grader.courses.scores import scores
from grader.submissions.lms import ON_THIS_CLOCK

SLUG = "01_toy"
ZONES = st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC"]).map(
    ZoneInfo
)
WALL = st.datetimes(datetime(2025, 1, 1), datetime(2028, 1, 1)).map(
    lambda moment: moment.replace(second=0, microsecond=0)
)
DUE = st.builds(lambda moment, zone: add_days(moment.replace(tzinfo=zone), 0), WALL, ZONES)


@given(DUE, st.integers(0, 40), st.integers(0, 86400))
def test_being_later_never_means_fewer_days(due: datetime, days: int, more: int) -> None:
    submitted = due.astimezone(UTC) + timedelta(days=days)
    assert days_late(due, submitted) <= days_late(due, submitted + timedelta(seconds=more))


@given(DUE, st.integers(0, 40))
def test_the_due_date_and_the_end_of_each_day_are_still_in_time(due: datetime, days: int) -> None:
    end = add_days(due, days).astimezone(UTC)
    assert days_late(due, end) == days
    assert days_late(due, end + timedelta(seconds=1)) == days + 1


@given(DUE, st.integers(0, 400))
def test_a_day_more_ends_at_the_same_time_of_day(due: datetime, days: int) -> None:
    moved = add_days(due, days)
    back = moved.astimezone(UTC).astimezone(due.tzinfo)
    exists = back.replace(tzinfo=None) == due.replace(tzinfo=None) + timedelta(days=days)
    in_a_gap = moved.replace(fold=0).utcoffset() != moved.replace(fold=1).utcoffset()
    assert exists or in_a_gap


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_a_penalty_grows_to_its_maximum_and_no_further(per_day: float, maximum: float, days: int) -> None:
    policy = Policy(per_day=per_day, maximum=maximum)
    assert 0 <= policy.fraction(days) <= policy.fraction(days + 1) <= maximum
    assert policy.fraction(0) == 0


def test_where_nothing_is_said_a_day_costs_nothing_and_no_maximum_is_below_all_points() -> None:
    assert Policy().fraction(100) == 0
    assert Policy(per_day=0.3).fraction(3) == pytest.approx(0.9)
    assert Policy(per_day=0.3).fraction(4) == 1


def test_the_night_when_the_clocks_change_has_its_hour_more_or_less() -> None:
    spring, autumn = parse_when("2027-03-27 23:59 Europe/Berlin"), parse_when("2027-10-30 23:59 Europe/Berlin")
    assert add_days(spring, 1).astimezone(UTC) - spring.astimezone(UTC) == timedelta(hours=23)
    assert add_days(autumn, 1).astimezone(UTC) - autumn.astimezone(UTC) == timedelta(hours=25)
    assert days_late(autumn, autumn.astimezone(UTC) + timedelta(hours=25)) == 1
    assert days_late(spring, spring.astimezone(UTC) + timedelta(hours=23, seconds=1)) == 2


def test_a_time_that_occurs_twice_is_the_later_one_and_one_that_never_occurs_is_refused() -> None:
    assert parse_when("2027-10-31 02:30 Europe/Berlin").astimezone(UTC) == datetime(2027, 10, 31, 1, 30, tzinfo=UTC)
    with pytest.raises(CourseError, match="clocks jump over"):
        parse_when("2027-03-28 02:30 Europe/Berlin")


@pytest.mark.parametrize("text", ["", "tomorrow", "2027-03-01", "2027-03-01 23:59", "2027-02-30 10:00 UTC",
                                  "2027-03-01 23:59 Europe/Atlantis", "2027-03-01 23:59 ../../etc/passwd",
                                  "2027-03-01 25:00 UTC"])  # fmt: skip
def test_what_is_not_a_due_date_is_refused_with_the_form_it_must_have(text: str) -> None:
    with pytest.raises(CourseError, match="expected YYYY-MM-DD HH:MM ZONE"):
        parse_when(text)


@pytest.mark.parametrize("text", ["per_day: 2", "per_day: a lot", "grace_minutes: -1", "unknown: 1", "due: tomorrow",
                                  "[", "due: {02_kv_cache: soon}", "extensions: {02_kv_cache: {ada: -1}}",
                                  "maximum: true"])  # fmt: skip
def test_a_policy_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "late.yaml").write_text(text)
    with pytest.raises(CourseError):
        read_policy(tmp_path)


def test_a_policy_is_read_as_it_was_written(tmp_path: Path) -> None:
    policy = Policy(15, 0.1, 0.5, {SLUG: "2027-03-01 23:59 Europe/Berlin"}, {SLUG: {"ada": 2}})
    write_policy(tmp_path, policy)
    assert read_policy(tmp_path) == policy


def penalties(root: Path) -> dict[str, float]:
    return {score.student: score.late_penalty for score in scores(root, SLUG) if score.score is not None}


def test_those_without_a_time_are_a_line_for_each_thing_that_the_lms_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"ada": False, "bob": None, "cyd": True, **{f"student{i:03}": False for i in range(60)}}
    monkeypatch.setattr(late, "read_history", lambda root, slug, student: [SimpleNamespace(late=said[student])])
    found: list[Any] = [SimpleNamespace(submitted=None, student=one) for one in said]
    lines = late.without_time(tmp_path, SLUG, found)
    assert lines[:2] == ["late, says the LMS (1): cyd", "the LMS says nothing (1): bob"]
    assert lines[2].startswith("in time, says the LMS (61): ada, student000,")
    assert max(map(len, lines)) <= 300
    assert re.findall(r"student\d+", " ".join(lines)) == [one for one in said if one.startswith("student")]


def test_late_work_loses_points_in_the_gradebook_and_in_time_work_does_not(
    course: Path, grade: Callable[..., str]
) -> None:
    at = ("--course", str(course))
    said = grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *at)
    assert "2026-03-01 22:59 UTC" in said
    assert set(penalties(course).values()) == {0.0}  # no policy, no cost
    said = grade("late", "01", "--per-day", "0.1", "--grace-minutes", "15", *at)
    assert "eve: 2 days" in said  # 2026-03-03 02:00 in Berlin
    assert "gus" in said.split("Without a time of handing in")[1]
    assert penalties(course) == {student: 1.2 if student == "eve" else 0.0 for student in penalties(course)}
    assert {score.student: score.total for score in scores(course, SLUG)}["eve"] == pytest.approx(3 - 1.2)


def test_an_extension_takes_effect_after_grading_and_can_be_taken_back(course: Path, grade: Callable[..., str]) -> None:
    at = ("--course", str(course))
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *at)
    grade("late", "01", "--per-day", "0.5", *at)
    assert penalties(course)["eve"] == 3  # never more than was earned
    grade("extend", "eve", "01", "1", *at)
    assert penalties(course)["eve"] == 3
    assert "Tuesday, 2026-03-03 23:59 CET" in grade("extend", "eve", "01", "2", *at)
    assert penalties(course)["eve"] == 0
    grade("extend", "eve", "01", "0", *at)
    assert penalties(course)["eve"] == 3


def by_files(course: Path, *students: str, time_from: str = "the file's own time") -> None:
    """The times of these students are their files' own, as after a collect of a folder."""
    for student in students:
        path = course / "received" / student / SLUG / "received.json"
        history = json.loads(path.read_text())
        history[-1]["time_from"] = time_from
        path.write_text(json.dumps(history))


def test_a_time_that_only_a_file_has_costs_nothing_until_it_is_confirmed(
    course: Path, grade: Callable[..., str]
) -> None:
    at = ("--course", str(course))
    by_files(course, "eve", "ada")
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *at)
    said = grade("late", "01", "--per-day", "0.1", *at)
    assert "eve: 2 days, by the file's own time, 2026-03-03 01:00 UTC; nothing off until confirmed" in said
    assert "inferlab grade late 01_toy --file-times" in said
    assert penalties(course)["eve"] == 0
    assert "nothing off until confirmed" in grade("report", "01", *at)
    assert "eve: 2 days, 1.2 points off" in grade("late", "01", "--file-times", *at)
    assert penalties(course)["eve"] == pytest.approx(1.2)
    assert "eve: '2026-03-03T01:00:00+00:00'" in (course / "late.yaml").read_text()
    grade("due", "01", "2026-02-27 12:00 UTC", *at)  # ada is late now, too, by a time that nobody has confirmed
    assert (penalties(course)["ada"], penalties(course)["eve"]) == (0, pytest.approx(0.1 * 4 * 6))
    grade("forget", "--student", "eve", "--yes", *at)
    assert "eve:" not in (course / "late.yaml").read_text()


def test_a_time_without_a_zone_costs_nothing_until_it_is_confirmed(course: Path, grade: Callable[..., str]) -> None:
    at = ("--course", str(course))
    by_files(course, "eve", time_from=f"blackboard's name for it{ON_THIS_CLOCK}")
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *at)
    said = grade("late", "01", "--per-day", "0.1", *at)
    assert (
        "eve: 2 days, by blackboard's name for it, as this machine's clock has it, 2026-03-03 01:00 UTC; noth" in said
    )
    assert penalties(course)["eve"] == 0
    grade("late", "01", "--file-times", *at)
    assert penalties(course)["eve"] == pytest.approx(1.2)


def test_an_option_given_twice_or_without_effect_is_refused_and_nothing_is_set(
    course: Path, grade: Callable[..., str]
) -> None:
    def histories() -> list[str]:
        return [(course / "received" / one / SLUG / "received.json").read_text() for one in ("eve", "ada")]

    when, before = "2026-03-01 10:00 UTC", histories()
    said = grade("late", "01", "--time", "eve", when, "--time", "ada", when, "--course", str(course), ok=False)
    assert "--time is given 2 times: give it once" in said
    assert histories() == before
    said = grade(
        "points", "01", "eve", "check_len", "1", "--comment", "a", "--comment", "b", "--course", str(course), ok=False
    )
    assert "--comment is given 2 times" in said
    assert "--lms says of which LMS the zip is" in grade(
        "feedback", "01", "--lms", "moodle", "--course", str(course), ok=False
    )


def test_a_file_time_that_contradicts_the_lms_is_shown_with_what_the_lms_said(
    course: Path, grade: Callable[..., str]
) -> None:
    at = ("--course", str(course))
    by_files(course, "eve", "ada")
    path = course / "received" / "eve" / SLUG / "received.json"
    history = json.loads(path.read_text())
    history[-1]["late"] = False
    path.write_text(json.dumps(history))
    grade("due", "01", "2026-02-27 12:00 UTC", *at)
    said = grade("late", "01", "--per-day", "0.1", *at)
    assert said.count("but in time, says the LMS") == 1
    assert "2026-03-03 01:00 UTC, but in time, says the LMS; nothing off until confirmed" in said
    said = grade("late", "01", "--file-times", *at)
    assert "until confirmed" not in said  # it was, by this very command
    assert "eve: 4 days, 2.4 points off" in said


def test_a_time_of_handing_in_can_be_set_and_stays(course: Path, grade: Callable[..., str], tmp_path: Path) -> None:
    at = ("--course", str(course))
    by_files(course, "eve")
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *at)
    grade("late", "01", "--per-day", "0.1", "--file-times", *at)
    assert penalties(course)["eve"] == pytest.approx(1.2)
    said = grade("late", "01", "--time", "eve", "2026-03-01 20:00 Europe/Berlin", *at)
    assert "eve" not in said
    assert penalties(course)["eve"] == 0
    assert (course / "submitted" / "eve" / SLUG / "timestamp.txt").read_text().startswith("2026-03-01 19:00")
    copied = tmp_path / "in" / "eve" / "toy.ipynb"  # collected once more, from a copy with a new time
    copied.parent.mkdir(parents=True)
    copied.write_bytes(next((course / "received" / "eve" / SLUG).glob("1_*")).read_bytes())
    assert "1 unchanged" in grade("collect", "01", str(tmp_path / "in"), *at)
    assert "eve" not in grade("late", "01", *at)
    assert "0 graded" in grade("run", "01", *at)
    assert "eve" in grade("late", "01", "--time", "eve", "unknown", *at).split("Without a time of handing in")[1]
    assert penalties(course)["eve"] == 0
    grade("late", "01", "--time", "gus", "2026-03-05 20:00 Europe/Berlin", *at)  # of whom no time was known
    assert penalties(course)["gus"] > 0
    for who, why in (("evve", "did you mean eve?"), ("zoe", "zoe has handed in nothing for 01_toy")):
        assert why in grade("late", "01", "--time", who, "2026-03-01 20:00 UTC", *at, ok=False)
    assert "expected YYYY-MM-DD" in grade("late", "01", "--time", "eve", "yesterday", *at, ok=False)


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("evee", "did you mean eve?"), ("ada@example.org", "did you mean ada?"), ("Zoë Zander", "did you mean zoe?"),
        ("EVE", "did you mean eve?"), ("02", "02 is neither in the roster nor has handed in anything"),
        ("../eve", "neither in"), ("", "neither in"), (".", "neither in"),
    ],
)  # fmt: skip
def test_an_extension_is_for_somebody_who_is_known(course: Path, grade: Callable[..., str], who: str, why: str) -> None:
    at = ("--course", str(course))
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *at)
    assert why in grade("extend", who, "01", "2", *at, ok=False)
    assert "extensions: {}" in (course / "late.yaml").read_text()


def test_nbgraders_own_grading_asks_the_same_policy(course: Path, grade: Callable[..., str]) -> None:
    from nbgrader.api import Gradebook

    at = ("--course", str(course))
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *at)
    grade("late", "01", "--per-day", "0.2", "--maximum", "0.3", *at)
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        for notebook in book.find_submission(SLUG, "eve").notebooks:
            notebook.late_submission_penalty = None
        book.db.commit()
    # Where the journal of what is in the gradebook is gone, nbgrader grades anew from the results that are there.
    (course / "results" / SLUG / "recorded.log").unlink()
    said = grade("run", "01", *at)
    assert "9 were graded before: what the gradebook lacked of them (results, times) is in it now. 0 graded" in said
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        assert book.find_submission(SLUG, "eve").late_submission_penalty == pytest.approx(0.3 * 6)
        assert book.find_submission(SLUG, "ada").late_submission_penalty == 0


def test_a_score_changed_by_hand_changes_what_being_late_costs(course: Path, grade: Callable[..., str]) -> None:
    from nbgrader.api import Gradebook

    at = ("--course", str(course))
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *at)
    grade("late", "01", "--per-day", "1", *at)
    assert penalties(course)["eve"] == 3
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        grade_ = book.find_grade("check_window", "toy", SLUG, "eve")
        grade_.manual_score = 2.0
        book.db.commit()
    assert penalties(course)["eve"] == 5


def test_a_due_date_of_the_formgrader_counts_where_the_course_file_has_none(
    course: Path, grade: Callable[..., str]
) -> None:
    from nbgrader.api import Gradebook

    grade("late", "01", "--per-day", "0.1", "--course", str(course))
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        book.update_or_create_assignment(SLUG, duedate="2026-03-02 01:00:00 UTC")
    assert penalties(course)["eve"] == pytest.approx(0.6)
    grade("due", "01", "never", "--course", str(course))
    assert penalties(course)["eve"] == 0


def test_without_a_time_what_the_lms_said_is_passed_on_and_costs_nothing(
    course: Path, grade: Callable[..., str]
) -> None:
    path = course / "received" / "gus" / SLUG / "received.json"
    history = json.loads(path.read_text())
    history[-1]["late"] = True
    path.write_text(json.dumps(history))
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", "--course", str(course))
    assert "late, says the LMS (1): gus" in grade("late", "01", "--per-day", "1", "--course", str(course))
    assert penalties(course)["gus"] == 0


def test_a_gradebook_that_somebody_else_writes_to_is_said_and_nothing_is_lost(
    course: Path, grade: Callable[..., str]
) -> None:
    import sqlite3

    with sqlite3.connect(course / "gradebook.db") as other:
        other.execute("BEGIN EXCLUSIVE")
        said = grade("export", "01", "--course", str(course), ok=False)
    assert "the gradebook cannot be used: database is locked" in said
    assert "ada" in grade("export", "01", "--course", str(course))


def test_a_wrong_due_date_changes_nothing(course: Path, grade: Callable[..., str]) -> None:
    said = grade("due", "01", "next week", "--course", str(course), ok=False)
    assert "expected YYYY-MM-DD" in said
    assert not (course / "late.yaml").exists()
