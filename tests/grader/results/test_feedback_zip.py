"""The zip of feedback pages: each LMS can tell from a page's name whose it is, by the rule of its own source."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

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
