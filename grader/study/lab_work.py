"""A learner's work on a lab: find it, check it, put a cell back, compare it with the reference."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grader.examination.intake import Refused, Submission, read_submission
from grader.labs.lab import Lab, LabError, find_lab, load_lab
from grader.results.result import CheckResult, Result
from grader.study import workspace
from grader.study.workspace_files import version_of

PROGRESS = "inferlab progress"


@dataclass(frozen=True)
class Work:
    """lab: as released. path: the learner's notebook."""

    lab: Lab
    path: Path


def has_edits(wanted: str) -> bool:
    """Whether the workspace has the lab's notebook and it differs from the release in what is written in its cells.

    Raises LabError for an unknown lab.
    """
    released = find_lab(workspace.labs_root(), wanted)
    mine = _place(released)
    return mine.exists() and version_of(mine.read_bytes()).text != version_of(released.read_bytes()).text


def open_work(wanted: str, file: Path | None = None) -> Work:
    """The learner's notebook of a lab, or `file` in its place. Raises LabError when there is none."""
    released = find_lab(workspace.labs_root(), wanted)
    path = file or _place(released)
    if not path.exists():
        raise LabError(f"there is no {path}; bring the lab with: inferlab lab start {wanted}")
    return Work(load_lab(released), path)


def check_file(work: Work) -> Result:
    """The visible checks on the saved notebook, with the intake and the examiner that grade a course."""
    raw = work.path.read_bytes()
    try:
        submission = read_submission(raw, work.lab)
    except Refused as error:
        raise LabError(f"{work.path}: {error}") from None
    return check_submission(work.lab, submission)


def check_submission(lab: Lab, submission: Submission) -> Result:
    """The visible checks on a submission, in a second process, with the public seed."""
    from grader.isolation.launcher import Launcher

    with Launcher(insecure=True) as launcher:  # starts in the background while torch is imported here
        import torch

        from grader.checks import PUBLIC_SECRET
        from grader.examination.examiner import examine

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return examine(lab, submission, launcher, secret=PUBLIC_SECRET)
        finally:
            torch.set_num_threads(threads)


def reset_cell(work: Work, cell: str) -> Path:
    """Put solution cell `cell` back to the release; returns the file the learner's text was saved to."""
    released = work.lab.cell(cell)
    if released is None or released.kind != "solution":
        known = ", ".join(c.grade_id for c in work.lab.of_kind("solution"))
        raise LabError(f"no cell {cell!r} that you write in this lab; they are: {known}")
    notebook: dict[str, Any] = json.loads(work.path.read_text("utf-8"))
    mine = [c for c in notebook["cells"] if c.get("metadata", {}).get("nbgrader", {}).get("grade_id") == cell]
    if not mine:
        raise LabError(f"{work.path} has no cell {cell} any more; start again in a new folder, or undo the deletion")
    kept = next(p for n in range(1, 10000) if not (p := work.path.with_name(f"{cell}.kept{n}.py")).exists())
    workspace.write_atomically(kept, "\n\n".join("".join(c["source"]) for c in mine).encode())
    for raw in mine:
        raw["source"] = released.source.splitlines(keepends=True)
        raw["outputs"], raw["execution_count"] = [], None
    text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
    workspace.write_atomically(work.path, text.encode())
    return kept


def difference(work: Work) -> str:
    """A unified diff from the reference to the learner's cells. Raises LabError where no solutions are at hand."""
    path = _reference(work.lab.slug)
    if path is None:
        if _from_bundle():
            raise LabError("this lab is your course's own, and its solution is with your instructor")
        raise LabError("the solutions are not part of the installed package; they are in the course's repository")
    submission = read_submission(work.path.read_bytes(), work.lab)
    lines: list[str] = []
    for cell in load_lab(path).of_kind("solution"):
        reference = [
            x for x in cell.source.splitlines() if "### BEGIN SOLUTION" not in x and "### END SOLUTION" not in x
        ]
        mine = submission.answers.get(cell.grade_id, "").splitlines()
        name = cell.grade_id
        lines += difflib.unified_diff(reference, mine, f"reference/{name}", f"yours/{name}", lineterm="")
    return "\n".join(lines)


def next_step(result: Result, lab: str, in_notebook: bool = False) -> str:
    """What to do after a check, in one or two sentences. lab: as the learner names it on commands, such as 02."""
    first: CheckResult | None = next((c for c in result.checks if c.status != "passed"), None)
    again = "run its cell and grader.check() again" if in_notebook else "save the notebook and check again"
    if first is None:
        if _from_bundle():
            return f"All checks passed. Hand it in the way your instructor says. What comes next says: {PROGRESS}"
        if _reference(result.lab) is None:
            where = f"solutions/{result.lab} of the course's repository"
            return (
                f"All checks passed. To compare with the reference, look into {where}. What comes next says: {PROGRESS}"
            )
        return (
            f"All checks passed. Compare with the reference: inferlab lab diff {lab}. What comes next says: {PROGRESS}"
        )
    if first.status == "not written":
        return f"Next: write what {first.grade_id} asks for, then {again}."
    return f"Next: start with {first.grade_id}; later checks often fail for the same reason. Then {again}."


def _reference(lab: str) -> Path | None:
    """The solution notebook of a lab; None where only the package is installed, and for the lab of a private course."""
    if _from_bundle():
        return None
    return next(iter(sorted((workspace.data_root() / "solutions" / lab).glob("*.ipynb"))), None)


def _from_bundle() -> bool:
    """Whether the workspace has its labs from an instructor's bundle."""
    return workspace.labs_root().parent == workspace.home()


def _place(released: Path) -> Path:
    return workspace.home() / "labs" / released.parent.name / released.name
