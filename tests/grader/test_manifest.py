from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from grader.study.manifest import ManifestError, load_course
from grader.study.workspace import chapters_root, data_root

COURSE = load_course()


def test_the_course_has_twenty_chapters_with_numbers_0_to_19_in_order() -> None:
    assert [chapter.number for chapter in COURSE.chapters] == list(range(20))


def test_a_finished_chapter_lists_exactly_the_notebooks_in_its_folder() -> None:
    for chapter in COURSE.chapters:
        on_disk = {path.stem for path in (chapters_root() / chapter.folder).glob("*.ipynb")}
        assert on_disk == {part.name for part in chapter.parts}, f"{chapter.folder}: see parts in course.yaml"


def test_a_released_lab_has_the_points_of_its_checks_and_no_other_lab_has_points() -> None:
    for chapter in COURSE.chapters:
        for lab in chapter.labs:
            notebook = data_root() / "labs" / chapter.folder / f"{lab.slug}.ipynb"
            points = None
            if notebook.exists():
                cells = json.loads(notebook.read_text("utf-8"))["cells"]
                points = sum(cell["metadata"].get("nbgrader", {}).get("points", 0) for cell in cells)
            assert lab.points == points, f"{notebook.name}: points in course.yaml"


def test_every_folder_of_a_chapter_or_lab_is_in_the_manifest() -> None:
    known = {chapter.folder for chapter in COURSE.chapters}
    for root in (chapters_root(), data_root() / "labs"):
        found = {path.name for path in root.glob("[0-9][0-9]_*") if path.is_dir()}
        assert found <= known


def write(path: Path, **changes: object) -> Path:
    chapter = {"number": 0, "slug": "a", "title": "A", "status": "planned", "minutes": 45, "prerequisites": []}
    course = {"title": "T", "install_url": "inferlab", "chapters": [chapter | changes]}
    path.write_text(yaml.safe_dump(course))
    return path


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"slug": "Not A Slug"}, "slug"),
        ({"status": "done"}, "status"),
        ({"status": "finished"}, "expected parts unless it is planned"),
        ({"minutes": 0}, "minutes"),
        ({"prerequisites": [3]}, r"prerequisites \[3\] are not listed before it"),
        ({"points": 10}, "points"),
        (
            {"status": "finished", "parts": [{"name": "chapter", "title": "A", "minutes": 30}]},
            "sum of its parts",
        ),
    ],
)
def test_a_wrong_entry_is_refused_by_name(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ManifestError, match=complaint):
        load_course(write(tmp_path / "course.yaml", **changes))


def test_a_number_listed_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "course.yaml")
    course = yaml.safe_load(path.read_text())
    course["chapters"] *= 2
    path.write_text(yaml.safe_dump(course))
    with pytest.raises(ManifestError, match="chapter 0 is listed twice"):
        load_course(path)


@pytest.mark.parametrize("text", ["", "title: [", "- a list"])
def test_a_file_that_is_no_manifest_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "course.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError, match=r"course\.yaml"):
        load_course(path)
    with pytest.raises(ManifestError, match="no-such-file"):
        load_course(tmp_path / "no-such-file")


def test_an_unknown_chapter_is_answered_with_the_known_ones() -> None:
    assert COURSE.chapter(2).folder == "02_kv_cache"
    with pytest.raises(ManifestError, match="no chapter 77; the course has 00, 01"):
        COURSE.chapter(77)
