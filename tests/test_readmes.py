"""The front page is short and true: its links lead somewhere, its Python runs, its tables say what is there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "docs", "chapters", "labs", "datasets", "datasets/traces", "grader", "tests")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")),
        *(ROOT / "reference_impl").rglob("*.md"),
    )
    if not path.name.startswith("LICENSE")
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("page", "most"), [("README.md", 700), ("reference_impl/README.md", 1800)])
def test_a_front_page_is_short(page: str, most: int) -> None:
    assert len(text(page).split()) <= most


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in LINK.findall(re.sub(r"```.*?```", "", text(page), flags=re.DOTALL)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target / "README.md" if target.is_dir() else target), link


@pytest.mark.parametrize("page", ["README.md", "reference_impl/README.md"])
def test_its_python_runs_and_the_text_goes_on_from_the_prompt(page: str) -> None:
    code = re.findall(r"```python\n(.*?)```", text(page), re.DOTALL)[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
    lines = [line for line in printed.getvalue().splitlines() if line.strip()]
    assert len(lines) >= 2
    assert len(set(lines)) == len(lines)  # a small model may go round in circles; here it should not


def test_what_is_said_of_planned_and_finished_chapters_is_the_manifests() -> None:
    chapters = yaml.safe_load(text("chapters/course.yaml"))["chapters"]
    numbers = [chapter["number"] for chapter in chapters if chapter["status"] == "planned"]
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    planned = " and ".join(f"{first:02} to {last:02}" for first, last in zip(firsts, lasts, strict=True))
    assert f"Chapters {planned} are planned" in text("README.md")
    assert f"| later, {planned} | planned;" in text("chapters/README.md")
    words = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
    labs = len(list((ROOT / "labs").glob("[0-9]*_*/*.ipynb")))
    said = re.sub(r"\s+", " ", text("README.md"))
    finished = [chapter for chapter in chapters if chapter["status"] == "finished"]
    assert f"has {words[len(finished) - 1]} finished chapters" in said
    assert f"{words[labs - 1]} labs" in said


def test_the_table_of_chapters_is_the_manifests() -> None:
    course = yaml.safe_load(text("chapters/course.yaml"))
    rows = {int(row[0]): row for row in re.findall(r"^\| (\d\d) ([^|]+)\| ([^|]+)\| ([^|]*)\| ([^|]+)\|$",
                                                   text("chapters/README.md"), re.MULTILINE)}  # fmt: skip
    finished = [chapter for chapter in course["chapters"] if chapter["status"] != "planned"]
    assert sorted(rows) == [chapter["number"] for chapter in finished]
    for chapter in finished:
        _, title, notebooks, lab, quiz = rows[chapter["number"]]
        folder = ROOT / "chapters" / f"{chapter['number']:02}_{chapter['slug']}"
        items = yaml.safe_load((folder / "quiz.yaml").read_text("utf-8"))["items"]
        parts = len(chapter["parts"])
        assert title.strip() == chapter["title"]
        more = ", more to come" * (chapter["status"] == "begun")
        assert notebooks.strip() == f"{parts} notebook{'s' * (parts > 1)}{more}"
        assert quiz.strip() == f"{len(items)} items"
        assert [one["slug"] for one in chapter.get("labs", []) if "points" in one] == re.findall(
            r"^`(\w+)`", lab.strip()
        )
