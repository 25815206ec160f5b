"""The gradebook over all labs, with the latest or the best attempt of each student."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

from grader.courses.attempts import best_earlier
from grader.submissions.receipt import released
from tests.grader.results.conftest import IN_TIME, hand_in

SLUG = "01_toy"
Grade = Callable[..., str]


def table(path: Path) -> dict[str, dict[str, str]]:
    return {row["student"]: row for row in csv.DictReader(io.StringIO(path.read_text("utf-8"), newline=""))}


def test_the_latest_or_the_best_attempt_counts(course: Path, tmp_path: Path, grade: Grade) -> None:
    where, made = ("--course", str(course)), tmp_path / "book.csv"
    hand_in(tmp_path / "again", released(course, SLUG)[0], "ada", {}, IN_TIME)  # six points before, and nothing now
    grade("collect", "01", str(tmp_path / "again"), *where)
    grade("run", "01", "--workers", "1", *where)
    assert best_earlier(course, SLUG, "ada") == (6, [])
    assert "ada" in grade("book", "--csv", str(made), *where)
    latest = table(made)
    assert latest[""] == {"student": "", "name": "points possible", SLUG: "6", "total": "6"}
    assert (latest["ada"][SLUG], latest["ada"]["total"], latest["bob"]["total"]) == ("0", "0", "6")
    assert (latest["zoe"][SLUG], latest["zoe"]["total"]) == ("", "0")
    assert latest["bob"]["name"].startswith("'=")  # no formula

    grade("book", "--best", "--csv", str(made), *where)
    best = table(made)
    assert (best["ada"]["total"], best["bob"]["total"], best["cyd"]["total"]) == ("6", "6", "3")


def test_what_is_kept_of_an_attempt_is_forgotten_with_its_student(course: Path, tmp_path: Path, grade: Grade) -> None:
    hand_in(tmp_path / "again", released(course, SLUG)[0], "ada", {}, IN_TIME)
    grade("collect", "01", str(tmp_path / "again"), "--course", str(course))
    grade("run", "01", "--workers", "1", "--course", str(course))
    assert list((course / "results" / SLUG / "attempts").glob("*/ada.json"))
    grade("forget", "--student", "ada", "--yes", "--course", str(course))
    assert not list((course / "results").rglob("ada.json"))
