"""The map of the course for START.ipynb: chapters with their notebooks, quiz and lab, what is done, what comes next."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from grader.links import QUIZ
from grader.study.manifest import Chapter, Course, load_course
from grader.study.progress import ChapterProgress, LabProgress, PartProgress, Progress, measure
from grader.study.progress_next import READ, next_step

_STYLE = """<style>
.inferlab-map table { border-collapse: collapse; width: 100%; table-layout: auto }
.inferlab-map td, .inferlab-map th { text-align: left !important; vertical-align: top; padding: 6px 12px 6px 0 }
.inferlab-map .planned { opacity: 0.7 }
.inferlab-map { container-type: inline-size; overflow-wrap: anywhere }
@container (max-width: 480px) {  /* a phone: a chapter's cells stand one below the other */
  .inferlab-map table, .inferlab-map tbody, .inferlab-map tr, .inferlab-map td { display: block }
  .inferlab-map tr:has(th) { display: none }
  .inferlab-map td { padding: 0 8px; white-space: normal; max-width: none }
  .inferlab-map tr { padding: 6px 0 }
  .inferlab-map td:nth-child(2):not(:empty)::before { content: "needs " }
  .inferlab-map td:nth-child(4):not(:empty)::before { content: "quiz " }
  .inferlab-map td:nth-child(5):not(:empty)::before { content: "lab " }
}
</style>"""


@dataclass(frozen=True)
class Shown:
    """A view for a notebook as HTML, for a terminal as text."""

    html: str
    text: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.html, "text/plain": self.text}


def course_map() -> Shown:
    """Reads the learner's progress anew. Paths are relative to the workspace, where START.ipynb is."""
    course, progress = load_course(), measure()
    step = next_step(progress)
    where = (
        f" ({_link(step.notebook, step.notebook)})" if step.notebook else f": <code>{html.escape(step.command)}</code>"
    )
    next_html = f"<p><b>Next:</b> {html.escape(step.why)}{where}</p>"
    rows, lines = [], [f"Next: {step.why} ({step.notebook or step.command})"]
    for chapter, done in zip(course.chapters, progress.chapters, strict=True):
        cells = _cells(chapter, done, course)
        style = ' class="planned"' if done.planned else ""
        rows.append(f"<tr{style}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        lines.append(_line(chapter, done))
    head = "".join(f"<th>{name}</th>" for name in ("chapter", "needs", "notebooks", "quiz", "lab"))
    notes = "".join(f"<p>Note: {html.escape(problem)}</p>" for problem in progress.problems)
    table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    page = f'<div class="inferlab-map">{next_html}{table}{notes}<p>{html.escape(_sum(progress))}</p></div>'
    return Shown(_STYLE + page, "\n".join([*lines, *(f"Note: {p}" for p in progress.problems), _sum(progress)]))


def _cells(chapter: Chapter, done: ChapterProgress, course: Course) -> list[str]:
    name = html.escape(f"{chapter.number:02d} {chapter.title}")
    needs = ", ".join(f"{number:02d}" for number in chapter.prerequisites)
    if done.planned:
        return [name, needs, "planned", "", ""]
    parts = [
        f"{_mark(_is_read(part))} {_link(part.path, part.title)}, {known.minutes} min{_share(part)}"
        for part, known in zip(done.parts, chapter.parts, strict=True)
    ]
    quiz = _link(done.parts[-1].path + QUIZ, f"{done.answered} of {done.items}") if done.items else ""
    if done.due:
        quiz += f", {done.due} due"
    labs = [
        f"{_mark(lab.solved)} {_link(f'labs/{lab.folder}/{lab.slug}.ipynb', known.title)}, {_points(lab)}"
        for lab, known in zip(done.labs, chapter.labs, strict=True)
        if lab.points is not None
    ]
    mark = _mark(done.items > 0 and done.answered == done.items)
    return [f"<b>{name}</b>", needs, "<br>".join(parts), f"{mark} {quiz}", "<br>".join(labs)]


def _line(chapter: Chapter, done: ChapterProgress) -> str:
    if done.planned:
        return f"{chapter.number:02d} {chapter.title}: planned"
    read = sum(_is_read(part) for part in done.parts)
    labs = "".join(f", lab {_points(lab)}" for lab in done.labs if lab.points is not None)
    return (
        f"{chapter.number:02d} {chapter.title}: {read} of {len(done.parts)} notebooks read, "
        f"{done.answered} of {done.items} questions answered{labs}"
    )


def _sum(progress: Progress) -> str:
    finished = [chapter for chapter in progress.chapters if not chapter.planned]
    parts = [part for chapter in finished for part in chapter.parts]
    labs = [lab for chapter in finished for lab in chapter.labs if lab.points is not None]
    return (
        f"Done so far: {sum(map(_is_read, parts))} of {len(parts)} notebooks, "
        f"{sum(chapter.answered for chapter in finished)} of {sum(chapter.items for chapter in finished)} questions, "
        f"{sum(lab.solved for lab in labs)} of {len(labs)} labs."
    )


def _is_read(part: PartProgress) -> bool:
    return part.run is not None and part.run >= READ * part.cells


def _share(part: PartProgress) -> str:
    begun = part.run and not _is_read(part)
    return f", {part.run} of {part.cells} cells run" if begun else ""


def _points(lab: LabProgress) -> str:
    return f"{lab.best or 0:g} of {lab.points} points"


def _mark(done: bool) -> str:
    return "✓" if done else "○"


def _link(path: str, text: str) -> str:
    return f'<a href="{html.escape(path)}">{html.escape(text)}</a>'
