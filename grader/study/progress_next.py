"""The one thing to do next: a command to type, or a notebook to open, and why."""

from __future__ import annotations

from dataclasses import dataclass

from grader.study.progress import ChapterProgress, LabProgress, PartProgress, Progress

# A part counts as read from here on: a learner may leave out a cell, and should not be sent back for it.
READ = 0.9


@dataclass(frozen=True)
class Step:
    """The next step. command: to type in a terminal. notebook: to open, in the workspace, or ""."""

    why: str
    command: str
    notebook: str = ""


def next_step(progress: Progress) -> Step:
    """Reviews first, because they lose by waiting; then what was begun; then the first chapter not begun."""
    finished = [chapter for chapter in progress.chapters if not chapter.planned]
    if due := sum(chapter.due for chapter in finished):
        questions = "1 question is" if due == 1 else f"{due} questions are"
        return Step(f"{questions} due for review", "inferlab quiz")
    open_ = [(chapter, step) for chapter in finished if (step := _in_chapter(chapter, progress.has_workspace))]
    begun = [step for chapter, step in open_ if _is_begun(chapter)]
    if begun or open_:
        return (begun or [step for _, step in open_])[0]
    when = f"; the next review is due on {progress.next_review:%Y-%m-%d}" if progress.next_review else ""
    return Step(f"every finished chapter is done{when}", "inferlab quiz --interview --minutes 20")


def _in_chapter(chapter: ChapterProgress, has_workspace: bool) -> Step | None:
    """The next step in a chapter, in its order: the parts, a first round of its quiz, the lab, the rest of the quiz."""
    number = chapter.folder.split("_")[0]
    for part in chapter.parts:
        if not _is_read(part):
            return _read(part, number, has_workspace)
    if chapter.items and not chapter.answered:
        return Step(f"chapter {number} is read: answer its {chapter.items} questions", f"inferlab quiz {number}")
    for lab in chapter.labs:
        if lab.points is not None and not lab.solved:
            return _build(lab, number)
    if chapter.answered < chapter.items:
        left = chapter.items - chapter.answered
        return Step(f"chapter {number} has {left} questions that you have not seen", f"inferlab quiz {number}")
    return None


def _read(part: PartProgress, number: str, has_workspace: bool) -> Step:
    if not has_workspace:
        return Step(f"start with chapter {number}, {part.title}", "inferlab learn", part.path)
    if part.run is None:
        why = f"{part.path} is damaged: move it away, and a fresh copy takes its place"
        return Step(why, "inferlab learn", part.path)
    if part.run == 0:
        return Step(f"read and run chapter {number}, {part.title}", "inferlab learn", part.path)
    return Step(f"go on with {part.title}: {part.run} of {part.cells} cells are run", "inferlab learn", part.path)


def _build(lab: LabProgress, number: str) -> Step:
    notebook = f"labs/{lab.folder}/{lab.slug}.ipynb"
    if not lab.started:
        return Step(f"build it yourself: lab {number}", f"inferlab lab start {number}", notebook)
    if lab.last is None:
        return Step(f"write lab {number} and have it checked", f"inferlab lab check {number}", notebook)
    begin = f"; begin with {lab.first_open}" if lab.first_open else ""
    return Step(
        f"lab {number} has {lab.last:g} of {lab.points} points{begin}", f"inferlab lab check {number}", notebook
    )


def _is_read(part: PartProgress) -> bool:
    return part.run is not None and part.run >= READ * part.cells


def _is_begun(chapter: ChapterProgress) -> bool:
    labs = any(lab.last is not None for lab in chapter.labs)
    return bool(any(part.run for part in chapter.parts) or chapter.answered or chapter.predicted or labs)
