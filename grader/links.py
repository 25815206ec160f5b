"""Links at both ends of every notebook of the course: previous and next, START, and a chapter's own quiz and lab.

The order is that of chapters/course.yaml: a chapter's parts, its labs, the next chapter. Links are relative, and the
same in the repository and in a learner's workspace, where `chapters/` and `labs/` lie beside START.ipynb. The builders
of notebooks put them there; a notebook that the course does not list gets none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grader.study.manifest import Course

START = "START.ipynb"
LINKS = "links"  # the id of the generated last cell
QUIZ = "#9.-Quiz"  # JupyterLab's address of a heading "9. Quiz"


@dataclass(frozen=True)
class Stop:
    """A notebook on the way through the course. path: in the workspace. quiz: whether it ends with one."""

    path: str
    title: str
    chapter: str = ""  # its folder
    quiz: bool = False


def way(course: Course | None = None) -> list[Stop]:
    """START and every finished notebook, in the order of study."""
    stops = [Stop(START, "START")]
    for chapter in (course or _course()).chapters:
        if chapter.status == "planned":
            continue
        number = f"{chapter.number:02d}"
        for part in chapter.parts:
            letter = part.name.split("_")[0] if len(chapter.parts) > 1 else ""
            path = f"chapters/{chapter.folder}/{part.name}.ipynb"
            stops.append(Stop(path, f"{number}{letter} {part.title}", chapter.folder, quiz=True))
        for lab in chapter.labs:
            if lab.points is not None:
                path = f"labs/{chapter.folder}/{lab.slug}.ipynb"
                stops.append(Stop(path, f"Lab {number} {lab.title}", chapter.folder))
    return stops


def links_of(path: str, course: Course | None = None) -> str:
    """The line of links of the notebook at `path` in the workspace; empty where it is not one of the course's."""
    stops = way(course)
    at = next((number for number, stop in enumerate(stops) if stop.path == path), None)
    if at is None:
        return ""
    here, links = stops[at], []
    if at > 0:
        links.append(f"← {_link(here, stops[at - 1])}")
    if at > 1:  # before the first chapter START is what comes before
        links.append(_link(here, stops[0]))
    if here.quiz:
        # With the file's own name: JupyterLab scrolls to a heading only where a link names a file.
        links.append(f"[Quiz]({here.path.rpartition('/')[2]}{QUIZ})")
        neighbours = stops[at - 1 : at + 2]
        labs = [stop for stop in stops if stop.chapter == here.chapter and not stop.quiz]
        links += [_link(here, lab) for lab in labs if lab not in neighbours]
    if at + 1 < len(stops):
        links.append(f"{_link(here, stops[at + 1])} →")
    return " · ".join(links)


def with_links(cells: list[dict[str, Any]], path: str, last: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of the notebook at `path`, its links below the title and in `last`, a markdown cell, at the end."""
    links = links_of(path)
    if not links or cells[-1]["id"] == LINKS:
        return cells
    title, *others = cells
    if title["cell_type"] != "markdown":
        raise ValueError(f"{path}: expected a title in the first cell, of markdown, got {title['cell_type']}")
    return [title | {"source": f"{title['source']}\n\n{links}"}, *others, last | {"source": links}]


def _link(here: Stop, there: Stop) -> str:
    if here.path.rpartition("/")[0] == there.path.rpartition("/")[0]:
        return f"[{there.title}]({there.path.rpartition('/')[2]})"
    up = "../" * here.path.count("/")
    return f"[{there.title}]({up}{there.path})"


@functools.cache
def _course() -> Course:
    from grader.study.manifest import load_course

    return load_course()
