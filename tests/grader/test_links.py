"""Previous and next at both ends of every notebook, in the order of the manifest; each leads to something."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from grader.chapter_source import ChapterError, chapter_notebook
from grader.labs.lab_source import solution_notebook
from grader.links import LINKS, START, links_of, way
from grader.study.manifest import load_course
from grader.study.workspace import prepare

ROOT = Path(__file__).parents[2]
NOTEBOOKS = [stop.path for stop in way()]
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS)


@functools.cache
def cells(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text("utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in found]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERLAB_HOME", str(tmp_path_factory.mktemp("links") / "home"))
        return prepare().home


def test_the_way_leads_through_every_finished_notebook_once() -> None:
    course = load_course()
    parts = [f"chapters/{c.folder}/{p.name}.ipynb" for c in course.chapters for p in c.parts]
    labs = [f"labs/{c.folder}/{lab.slug}.ipynb" for c in course.chapters for lab in c.labs if lab.points]
    assert sorted(NOTEBOOKS) == sorted([START, *parts, *labs])
    assert [path for path in NOTEBOOKS if path in parts] == parts


@every_notebook
def test_every_link_between_notebooks_has_a_target_in_the_repository_and_in_the_workspace(
    path: str, home: Path
) -> None:
    for root in (ROOT, home):
        text = "\n".join(cell["source"] for cell in cells(root / path) if cell["cell_type"] == "markdown")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.search(r"^#|\.ipynb", target):  # another page, or code such as kernel[grid](...)
                continue
            name, _, heading = target.partition("#")
            there = (root / path).parent / name if name else root / path
            assert there.is_file(), f"{target}: no such file in {root}"
            if heading:
                titles = [
                    line.lstrip("# ").replace(" ", "-")
                    for cell in cells(there.resolve())
                    if cell["cell_type"] == "markdown"
                    for line in cell["source"].splitlines()
                    if line.startswith("#")
                ]
                assert unquote(heading) in titles, f"{target}: no such heading"


@pytest.mark.parametrize("path", NOTEBOOKS[1:])
def test_the_links_stand_under_the_title_and_in_the_last_cell(path: str) -> None:
    found, links = cells(ROOT / path), links_of(path)
    assert found[0]["source"].startswith("# ")
    assert found[0]["source"].endswith(f"\n\n{links}")
    assert found[-1]["id"] == LINKS
    assert found[-1]["source"] == links
    at = NOTEBOOKS.index(path)
    targets = re.findall(r"\]\(([^)]+)\)", links)
    assert (ROOT / path).parent.joinpath(targets[0]).resolve() == ROOT / NOTEBOOKS[at - 1]
    if at + 1 < len(NOTEBOOKS):
        assert (ROOT / path).parent.joinpath(targets[-1]).resolve() == ROOT / NOTEBOOKS[at + 1]
    assert (f"[Quiz]({Path(path).name}#9.-Quiz)" in links) == path.startswith("chapters/")
    if path.startswith("labs/"):
        assert found[-1]["metadata"]["nbgrader"] | {"locked": True} == found[-1]["metadata"]["nbgrader"]
        assert found[-1]["metadata"]["editable"] is False


def test_a_notebook_that_is_not_the_courses_gets_none(toy_source: Path) -> None:
    assert links_of("labs/01_toy/toy.ipynb") == ""
    assert solution_notebook(toy_source)["cells"][-1]["id"] != LINKS


def test_a_source_does_not_name_a_cell_as_the_generated_one(tmp_path: Path) -> None:
    path = tmp_path / "part.py"
    path.write_text('# %% name="links"\nx = 1\n', "utf-8")
    with pytest.raises(ChapterError, match="taken"):
        chapter_notebook(path, "inferlab")
