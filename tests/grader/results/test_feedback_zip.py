"""The zip of feedback pages: each LMS can tell from a page's name whose it is, by the rule of its own source."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from grader.course import CourseError
from grader.reports.feedback_zip import write_feedback_zip
from grader.submissions.history import Version
from grader.submissions.roster import Roster, Student, save_roster
from tests.grader.results.conftest import APPLY, IN_TIME, RIGHT, hand_in

SLUG = "01_toy"
Grade = Callable[..., str]
# By the names of each form: who has which number. Mallory's name holds another student's.
CANVAS = {"adalovelace_LATE_4711_88_toy.ipynb": "88", "mallory4711_4712_89_toy.ipynb": "89"}
MOODLE = {"Ada Lovelace_77_assignsubmission_file/toy.ipynb": "77", "x_99_y_78_assignsubmission_file/toy.ipynb": "78"}


def zip_of(folder: Path, release: Path, names: dict[str, str]) -> Path:
    hand_in(folder, release, "one", {"Window": RIGHT, "apply_all": APPLY + "# mine"}, IN_TIME)
    made = folder / "download.zip"
    with zipfile.ZipFile(made, "w") as archive:
        for name in names:
            archive.write(folder / "one" / "toy.ipynb", name)
    return made


def names_in(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


@pytest.mark.parametrize(("form", "names"), [("canvas", CANVAS), ("moodle", MOODLE)])
def test_the_lms_can_tell_whose_each_page_is(
    course: Path, tmp_path: Path, grade: Grade, form: str, names: dict[str, str]
) -> None:
    source = zip_of(tmp_path, course / "labs" / SLUG / "toy.ipynb", names)
    grade("collect", "01", str(source), "--format", form, "--course", str(course))
    grade("run", "01", "--workers", "1", "--course", str(course))
    said = grade("feedback", "01", "--zip", str(tmp_path / "back.zip"), "--course", str(course))
    assert f"named as for {form}" in said
    assert "cyd" in said.split("Not in the zip")[1]  # who had handed in by a folder
    found = names_in(tmp_path / "back.zip")
    assert len(found) == 2
    for name in found:
        parts = name.split("_", 4)
        if form == "moodle":
            assert parts[1] in names.values()
            assert parts[2:4] == ["assignsubmission", "file"]
        else:
            numbers = [part for part in name.split("_") if re.fullmatch(r"\d+", part)]
            assert numbers[:2] in (["4711", "88"], ["4712", "89"])


def test_pages_of_a_folder_are_packed_by_student(course: Path, tmp_path: Path, grade: Grade) -> None:
    grade("feedback", "01", "--zip", str(tmp_path / "back.zip"), "--course", str(course))
    assert f"ada/{SLUG}.html" in names_in(tmp_path / "back.zip")


def canvas_reads(name: str) -> tuple[str, str] | None:
    """Whose Canvas takes a file for, and for which file that was handed in, by the rule of its source."""
    parts = [part for part in name.split("/")[-1].split("_") if part != "LATE"]
    numbers = [part for part in parts if re.fullmatch(r"[0-9]+", part)]
    found = numbers[:2] if parts[0] != "anon" else [f"anonymous {parts[1]}", parts[2]]
    if len(found) < 2 or parts[-1].startswith("link") or name.startswith("._"):
        return None
    return found[0], found[1]


def moodle_reads(name: str) -> tuple[str, str] | None:
    """Which participant's Moodle takes a file for, and the name it shows."""
    parts = name.split("/")[0].split("_", 4)
    if len(parts) < 4 or not parts[1].isdigit() or parts[2:4] != ["assignsubmission", "file"]:
        return None
    return parts[1], "_".join(parts[4:])


READ = {"canvas": canvas_reads, "moodle": moodle_reads}


def packed(
    root: Path, slug: str, form: str, handed_in: dict[str, str], num_pages: int = 1
) -> tuple[list[str], list[str]]:
    """The names in the zip of pages of students, each of whom handed in a file of this name by this form; and who is
    left out."""
    pages = []
    for student, path in handed_in.items():
        digest = hashlib.sha256(b"").hexdigest()
        late: bool | None = None
        version = Version("", digest, path, "", form, "", "", late, [], "2026-03-01T12:00:00+00:00")
        history = root / "received" / student / slug / "received.json"
        history.parent.mkdir(parents=True)
        history.write_text(json.dumps([asdict(version)]))
        for number in range(num_pages):
            page = root / "feedback" / student / slug / f"page{number}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(student)
            os.utime(page, (0, 0))  # a zip knows no year before 1980
            pages.append(page)
    found, left_out = write_feedback_zip(root, slug, pages, root / "back.zip")
    assert found == form
    return names_in(root / "back.zip"), left_out


@pytest.mark.parametrize("form", ["canvas", "moodle"])
@pytest.mark.parametrize("slug", ["01_toy", "07_link", "08_1234_links", "09_late_LATE", "10_file_12_34"])
@pytest.mark.parametrize("student", ["ada", "anon", "LATE", "link", "4711", "a1-2.b_77_8_x", "Anon-5", "l" * 90, "zoë"])
def test_no_students_id_and_no_labs_name_hides_whose_a_page_is(
    tmp_path: Path, form: str, slug: str, student: str
) -> None:
    paths = {"canvas": "lovelaceada_LATE_4711_88_toy.ipynb", "moodle": "Ada L_4711_assignsubmission_file/toy.ipynb"}
    save_roster(tmp_path, Roster({student: Student(student, ids={"canvas_id": "4711", "participant": "5"})}))
    (name,), left_out = packed(tmp_path, slug, form, {student: paths[form]})
    assert left_out == []
    assert name.isascii()
    assert len(name) < 200
    assert READ[form](name) == ("4711", "88" if form == "canvas" else f"{slug.replace('_', '-')}-feedback.html")


def test_a_page_goes_back_to_an_anonymous_assignment_of_canvas(tmp_path: Path) -> None:
    files = {"anon_x7Dk2": "LATE_anon_x7Dk2_88_toy.ipynb", "anon_abcde": "anon_abcde_89_12_34_toy.ipynb"}
    names, left_out = packed(tmp_path, "01_toy", "canvas", files)
    assert [canvas_reads(name) for name in names] == [("anonymous x7Dk2", "88"), ("anonymous abcde", "89")]
    assert left_out == []


@pytest.mark.parametrize("form", ["canvas", "moodle"])
def test_no_student_gets_the_page_of_another_whom_the_lms_takes_for_the_same(tmp_path: Path, form: str) -> None:
    names = {"canvas": "x_{}_8{}_toy.ipynb", "moodle": "x_{}_assignsubmission_file/toy{}.ipynb"}[form]
    numbers = {"ada": "4711", "bob": "4711", "cyd": "4712"}
    save_roster(tmp_path, Roster({one: Student(one, ids={"canvas_id": number}) for one, number in numbers.items()}))
    files = {one: names.format(number, n) for n, (one, number) in enumerate(numbers.items())}
    found, left_out = packed(tmp_path, "01_toy", form, files)
    assert left_out == ["ada", "bob"]
    assert [READ[form](name)[0] for name in found] == ["4712"]  # type: ignore[index]


def test_where_students_handed_in_by_both_one_lms_has_to_be_named(tmp_path: Path) -> None:
    save_roster(tmp_path, Roster({"ada": Student("ada", ids={"canvas_id": "4711"}), "bob": Student("bob")}))
    packed(tmp_path, "01_toy", "moodle", {"bob": "Bob_78_assignsubmission_file/toy.ipynb"})
    packed(tmp_path, "01_toy", "canvas", {"ada": "ada_4711_88_toy.ipynb"})
    pages = sorted((tmp_path / "feedback").rglob("*.html"))
    assert len(pages) == 2
    with pytest.raises(
        CourseError, match=r"from Canvas \(1\) and from Moodle \(1\), .* --lms canvas, then --lms moodle"
    ):
        write_feedback_zip(tmp_path, "01_toy", pages, tmp_path / "x.zip")
    for form, reads, other in (("canvas", "4711", "bob"), ("moodle", "78", "ada")):
        assert write_feedback_zip(tmp_path, "01_toy", pages, tmp_path / "x.zip", form) == (form, [other])
        (name,) = names_in(tmp_path / "x.zip")
        read = READ[form](name)
        assert read is not None
        assert read[0] == reads
    with pytest.raises(CourseError, match="handed in by blackboard; expected canvas or moodle"):
        write_feedback_zip(tmp_path, "01_toy", pages, tmp_path / "x.zip", "blackboard")


def test_a_number_of_another_assignment_is_not_used(tmp_path: Path) -> None:
    save_roster(tmp_path, Roster({"ada": Student("ada", ids={"participant": "77"})}))
    assert packed(tmp_path, "01_toy", "moodle", {"ada": "a folder/toy.ipynb"}) == ([], ["ada"])


def test_two_pages_of_a_student_have_names_of_their_own(tmp_path: Path) -> None:
    names, _ = packed(tmp_path / "a", "01_toy", "folders", {"ada": "toy.ipynb", "zoë": "toy.ipynb"}, num_pages=2)
    assert names == ["ada/01_toy.html", "ada/01_toy-2.html", "zoë/01_toy.html", "zoë/01_toy-2.html"]
    names, _ = packed(
        tmp_path / "b", "01_toy", "moodle", {"ada": "Ada L_77_assignsubmission_file/toy.ipynb"}, num_pages=2
    )
    assert len({moodle_reads(name) for name in names}) == 2
