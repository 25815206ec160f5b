"""`inferlab grade roster` and `collect` as an instructor sees them."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grader.course import new_course


def inferlab(*arguments: str | Path, ok: bool = True) -> str:
    return " ".join(" ".join(lines(*arguments, ok=ok)).split())


def lines(*arguments: str | Path, ok: bool = True) -> list[str]:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return list(done.output.splitlines())


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory, release_text: str) -> Path:
    """A course with a released lab and a roster of three."""
    root = tmp_path_factory.mktemp("class") / "course"
    new_course(root)
    (root / "labs" / "01_toy").mkdir()
    (root / "labs" / "01_toy" / "toy.ipynb").write_text(release_text)
    (root.parent / "canvas.csv").write_text(
        "Student,ID,SIS User ID,SIS Login ID,Section,Lab 1 (3)\n"
        '"Lovelace, Ada",11,S1,ada,A,\n"Noether, Emmy",12,S2,emmy,A,\n"Hopper, Grace",13,S3,grace,B,\n'
    )
    said = inferlab("roster", root.parent / "canvas.csv", "--course", root)
    assert "3 students: 3 new, 0 changed" in said
    return root


def test_the_roster_is_in_the_gradebook(course: Path) -> None:
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        ada = book.find_student("ada")
        assert (ada.first_name, ada.last_name, ada.lms_user_id) == ("Ada", "Lovelace", "11")
    assert "3 students: 0 new, 0 changed" in inferlab("roster", course.parent / "canvas.csv", "--course", course)


def test_a_collect_says_what_it_found_and_what_is_missing(course: Path, release_text: str) -> None:
    path = course.parent / "submissions.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("lovelaceada_LATE_11_1_toy-2.ipynb", release_text)
        archive.writestr("noetheremmy_12_2_toy.ipynb", "{")
        archive.writestr("strangersam_99_3_\x1b[31mtoy.ipynb", release_text)
        archive.writestr("index.html", "")
    said = inferlab("collect", "01", path, "--course", course)
    assert "ada: new; the file is named toy-2.ipynb: it was taken for toy.ipynb" in said
    assert "emmy: refused: the file is not a notebook: it ends in the middle" in said
    assert "late by the LMS (1): ada" in said
    assert "not in the roster, taken in (1): 99 (strangersam)" in said
    assert "nothing handed in (1): grace" in said
    assert "ignored, files of no student (1): index.html" in said
    assert "3 submissions taken in, 1 of them refused, 0 unchanged (format: canvas)" in said
    assert "\x1b" not in said
    assert "3 unchanged" in inferlab("collect", "01", path, "--course", course, "--format", "canvas")
    assert json.loads((course / "roster.json").read_text())["others"] == {"99": "canvas:99"}


def test_each_student_has_one_line(course: Path, release_text: str) -> None:
    path = course.parent / "lines.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ada/toy (1).ipynb", release_text.replace("check_len", "check_x"))
        archive.writestr("ada/other.ipynb", release_text)
        archive.writestr("grace/toy.ipynb", release_text)
    said = lines("collect", "01", path, "--course", course)
    assert [line.split(";")[0] for line in said if line.startswith(("ada:", "grace:"))] == [
        "ada: changed",
        "grace: new",
    ]
    assert not [line for line in lines("collect", "01", path, "--course", course) if line.startswith("ada:")]


def test_what_would_cost_points_is_said_and_taken_only_when_told(course: Path, release_text: str) -> None:
    def submitted(*names: str) -> Path:
        path = course.parent / "canvas2.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for number, name in enumerate(names):
                broken = "broken" in name
                archive.writestr(name.replace("broken", ""), "{" if broken else release_text + " " * (number + 1))
        return path

    def counts() -> str:
        return str(json.loads((course / "received" / "grace" / "01_toy" / "received.json").read_text())[-1]["path"])

    inferlab(
        "collect", "01", submitted("hoppergrace_13_50_toy.ipynb", "hoppergrace_13_60_toy-1.ipynb"), "--course", course
    )
    assert counts() == "hoppergrace_13_60_toy-1.ipynb"
    said = inferlab("collect", "01", submitted("hoppergrace_13_40_toy.ipynb"), "--course", course)
    assert "older than what is there, kept beside it (1): grace" in said
    broken = submitted("hoppergrace_13_70_toybroken.ipynb")
    said = inferlab("collect", "01", broken, "--course", course)
    assert "grace: it would be refused: the file is not a notebook: it ends in the middle" in said
    assert "left as it was, see above; --yes replaces it (1): grace" in said
    assert counts() == "hoppergrace_13_60_toy-1.ipynb"
    assert "grace: refused" in inferlab("collect", "01", broken, "--course", course, "--yes")
    assert counts() == "hoppergrace_13_70_toy.ipynb"


def test_whose_says_whose_a_file_is(course: Path, release_text: str) -> None:
    path = course.parent / "whose.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("Emmy/toy.ipynb", release_text + "  ")
        archive.writestr("emmy/toy.ipynb", release_text + "   ")
    said = inferlab("collect", "01", path, "--course", course, ok=False)
    assert "emmy: Emmy/toy.ipynb and emmy/toy.ipynb Nothing was taken in" in said
    assert "expected FILE=STUDENT" in inferlab("collect", "01", path, "--course", course, "--whose", "emmy", ok=False)
    inferlab("collect", "01", path, "--course", course, "--whose", "Emmy=", "--yes")
    assert "Emmy" not in (course / "received" / "emmy" / "01_toy" / "received.json").read_text()


def test_the_span_of_times_is_shown_with_what_it_rests_on(course: Path, release_text: str) -> None:
    path = course.parent / "folders.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for day, student in ((1, "emmy"), (9, "grace")):
            archive.writestr(zipfile.ZipInfo(f"{student}/toy.ipynb", (2026, 11, day, 12, 0, 0)), release_text)
    said = inferlab("collect", "01", path, "--course", course, "--yes")
    assert re.search(
        r"handed in from 2026-1\d-\d\d \d\d:\d\d to 2026-11-\d\d \d\d:\d\d UTC, by the file's own time", said
    )


def test_a_wrong_format_or_file_ends_with_a_sentence(course: Path, release_text: str) -> None:
    path = course.parent / "in" / "ada.ipynb"
    path.parent.mkdir()
    path.write_text(release_text)
    assert "no file in it has a name of the form moodle" in inferlab(
        "collect", "01", path.parent, "--course", course, "--format", "moodle", ok=False
    )
    assert "names no student" in inferlab("roster", path, "--course", course, ok=False)
    assert "there is no such file" in inferlab("roster", course / "none.csv", "--course", course, ok=False)


def test_without_a_roster_moodles_numbers_are_explained(tmp_path: Path, release_text: str) -> None:
    new_course(tmp_path / "course")
    (tmp_path / "course" / "labs" / "01_toy").mkdir()
    (tmp_path / "course" / "labs" / "01_toy" / "toy.ipynb").write_text(release_text)
    folder = tmp_path / "in" / "Ada Lovelace_7_assignsubmission_file"
    folder.mkdir(parents=True)
    (folder / "toy.ipynb").write_text(release_text)
    said = inferlab("collect", "01", tmp_path / "in", "--course", tmp_path / "course")
    assert "Moodle numbers people anew for every assignment" in said
    assert "(format: moodle)" in said
