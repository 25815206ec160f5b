"""Every erratum and every number of the course has one row, and every test a row names exists."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REGISTER = yaml.load((ROOT / "tests/claims/register.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
CHAPTERS = yaml.load((ROOT / "chapters/coverage.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)["chapters"]
# Errata per chapter, 00 to 19: 159 in all.
ERRATA_PER_CHAPTER = (10, 15, 14, 9, 7, 15, 6, 12, 11, 4, 7, 6, 14, 9, 3, 4, 3, 4, 1, 5)
ROWS = [*REGISTER["errata"], *REGISTER["values"]]


def named_tests(row: dict[str, Any]) -> list[str]:
    named = row.get("test", [])
    return [named] if isinstance(named, str) else named


def defined_tests(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_there_are_159_errata_each_once_and_in_order() -> None:
    ids = [row["id"] for row in REGISTER["errata"]]
    expected = [f"E{ch:02d}.{n}" for ch, count in enumerate(ERRATA_PER_CHAPTER) for n in range(1, count + 1)]
    assert ids == expected
    assert len(ids) == 159


def test_there_are_48_numbers_each_once_and_in_order() -> None:
    assert [row["id"] for row in REGISTER["values"]] == [f"N{n:02d}" for n in range(1, 49)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_row_has_a_short_title_chapters_and_something_to_show(row: dict[str, Any]) -> None:
    assert set(row) <= {"id", "title", "chapter", "chapters", "test", "later"}
    assert 1 <= len(row["title"].split()) <= 12
    chapters = row.get("chapters", [row.get("chapter")])
    assert chapters
    assert set(chapters) <= set(CHAPTERS)
    if row["id"].startswith("E"):
        assert row["chapter"] == row["id"][1:3]
    assert named_tests(row) or row.get("later"), f"{row['id']}: expected a test or the part it waits for"


@pytest.mark.parametrize("row", [row for row in ROWS if "test" in row], ids=lambda row: row["id"])
def test_every_named_test_exists(row: dict[str, Any]) -> None:
    for node in named_tests(row):
        path, name = node.split("::")
        assert (ROOT / path).is_file(), f"{row['id']}: no file {path}"
        assert name in defined_tests(ROOT / path), f"{row['id']}: no test {name} in {path}"


def test_titles_are_all_different() -> None:
    titles = [row["title"].lower() for row in ROWS]
    assert len(set(titles)) == len(titles)


def test_every_claim_test_belongs_to_a_row() -> None:
    """A test named after an erratum must be the one its row names, so that none is orphaned by a renaming."""
    named = {node for row in ROWS for node in named_tests(row)}
    for path in sorted((ROOT / "tests/claims").glob("test_chapter_*.py")):
        for name in defined_tests(path):
            if re.match(r"test_e\d\d_\d\d_", name):
                assert f"tests/claims/{path.name}::{name}" in named


def test_a_finished_chapter_has_no_erratum_that_waits_for_it() -> None:
    waiting = [
        f"{row['id']}: {row['later']}"
        for row in REGISTER["errata"]
        if CHAPTERS[row["chapter"]]["finished"] and f"chapter {row['chapter']}" in row.get("later", "")
    ]
    assert waiting == []
