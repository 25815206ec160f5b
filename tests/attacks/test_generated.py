"""A class of generated hostile notebooks through the whole day: collect, run, report, feedback, export.

`make test` tries the same 10 each time, `make test-all` 300 that the commit draws. What is wrong with one of them costs
its own student what it must, and nobody else anything; no step of the day stops.
"""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.generated import MARK, Generated, generate

HONEST = ("a-honest", "s1-honest", "z-honest")
ENDINGS = {"passed", "failed", "timed out", "crashed", "killed for memory", "not written", "not run", "refused"}
PATIENT = {"call": 120.0, "check": 600.0, "total": 1200.0, "memory": 1 << 30}
# Of those that may never end. An honest call takes milliseconds of the processor time that it has.
HANGING = {**PATIENT, "call": 2.0, "check": 15.0, "total": 45.0}
EACH = pytest.mark.parametrize(
    "generated_class", [10, pytest.param(300, marks=pytest.mark.slow)], indirect=True, scope="module"
)


def seed(number: int) -> str:
    """Of many, others in each commit, the same for all who try this one. Of a few always the same: who commits is not
    to be stopped by what somebody else's change lets through."""
    if number <= 10:
        return "a few"
    root = Path(__file__).parents[2]
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return asked.stdout.strip()[:12]


class Day:
    """A course at the end of the day, what was handed in, and what the commands said."""

    def __init__(self, made: Any, handed: dict[str, Generated], folder: Path):
        self.made, self.handed, self.folder, self.said = made, handed, folder, ""


@pytest.fixture(scope="module")
def generated_class(
    request: pytest.FixtureRequest, place: Any, grade: Any, solved: Any, command: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Day:  # fmt: skip
    number, folder = request.param, tmp_path_factory.mktemp(f"generated{request.param}")
    made = place(f"generated{number}")
    solution, release = ((made.root / top / "01_toy" / "toy.ipynb").read_text("utf-8") for top in ("solutions", "labs"))
    handed = {f"s{i}-generated": generate(i, seed(number), solution, release) for i in range(number)}
    (folder / "in").mkdir()
    for student, one in handed.items():
        (folder / "in" / f"{student}.ipynb").write_bytes(one.raw)
    for student in HONEST:
        (folder / "in" / f"{student}.ipynb").write_text(json.dumps(solved(made)), "utf-8")

    def limits(student: str) -> dict[str, float]:
        return HANGING if student in handed and handed[student].hangs else PATIENT

    grade(made, folder / "in", limits_of=limits)
    day, course = Day(made, handed, folder), str(made.root)
    day.said = command("report", "01", "--course", course, "--html", str(folder / "report.html"))
    day.said += command("export", "01", "--course", course, "-o", str(folder / "grades.csv"))
    return day


class Tags(HTMLParser):
    """All that a browser would act on: tags with their attributes, and what stands in scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.acting: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag in ("script", "style")
        self.acting.append(f"{tag} {attrs}")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.acting.append(data)


@pytest.mark.timeout(5400)
@EACH
def test_every_generated_submission_ends_with_a_status_of_its_own(generated_class: Day) -> None:
    for student, one in generated_class.handed.items():
        result = generated_class.made.result(student)
        statuses = {check["grade_id"]: check["status"] for check in result["checks"]}
        said = (one.pieces, one.base, [(check["status"], check["message"][:300]) for check in result["checks"]])
        assert set(statuses.values()) <= ENDINGS, said
        assert all(check["message"] for check in result["checks"] if check["status"] != "passed"), said
        if one.base == "stub":
            assert result["earned"] == 0, said
        assert generated_class.made.recorded()[student] == (result["earned"], 0), said


@EACH
def test_honest_submissions_between_them_have_all_their_points(generated_class: Day) -> None:
    for student in HONEST:
        assert generated_class.made.result(student)["earned"] == 6
        assert generated_class.made.recorded()[student] == (6.0, 0)


@EACH
def test_everyone_is_on_every_page_and_no_page_does_anything_for_a_student(generated_class: Day) -> None:
    students = {*generated_class.handed, *HONEST}
    for student in students:
        pages = list((generated_class.made.root / "feedback" / student).rglob("*.html"))
        assert len(pages) == 1, student
        assert_tame(pages[0])
    assert_tame(generated_class.folder / "report.html")
    with (generated_class.folder / "grades.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert {next(iter(row.values())) for row in rows} == students


def assert_tame(page: Path) -> None:
    tags = Tags()
    tags.feed(page.read_text("utf-8"))
    assert not [acting for acting in tags.acting if MARK in acting], page
    assert page.stat().st_size < 2 << 20


@EACH
def test_nothing_around_the_class_changed(generated_class: Day) -> None:
    assert generated_class.made.files() == generated_class.made.before
    said = generated_class.said + generated_class.made.said + generated_class.made.said_by_collect
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in said)
