"""A learner's work on a lab: find it, check it, put a cell back, compare it with the reference."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grader.examination.intake import read_submission
from grader.examination.notebook_file import Refused, read_cells
from grader.examination.submission import Submission, rebuild
from grader.labs.lab import Cell, Lab, LabError, find_lab, load_lab
from grader.results.result import CheckResult, Result
from grader.study import workspace
from grader.study.workspace_files import place_beside, version_of

PROGRESS = "inferlab progress"


@dataclass(frozen=True)
class Work:
    """A lab and the learner's work on it. lab: as released, in the notebook `released`. path: the learner's
    notebook."""

    lab: Lab
    path: Path
    released: Path


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
    if file is not None and not file.is_file():
        what = "it is a folder, and a notebook is needed" if file.is_dir() else "there is no such file"
        raise LabError(f"{file}: {what}. Expected the .ipynb file of lab {wanted}")
    if not path.exists():
        raise LabError(f"there is no {path}; bring the lab with: inferlab lab start {wanted}")
    return Work(load_lab(released), path, released)


def released_lab(wanted: str) -> Lab:
    """A lab as released. Raises LabError for an unknown one."""
    return load_lab(find_lab(workspace.labs_root(), wanted))


def check_file(work: Work, on_start: Callable[[Cell], None] = lambda cell: None) -> Result:
    """Runs the visible checks on the saved notebook, with the intake and the examiner that grade a course."""
    return check_submission(work.lab, submission_of(work), on_start)


def submission_of(work: Work) -> Submission:
    """What the learner wrote. Raises LabError, OSError where it cannot be read."""
    raw = work.path.read_bytes()
    try:
        submission = read_submission(raw, work.lab)
    except Refused as error:
        raise LabError(_unreadable(work, str(error))) from None
    if submission.notes and (other := _other_lab(raw, work.lab)):
        number, file = other.split("_")[0], shlex.quote(str(work.path))
        raise LabError(
            f"{work.path} is a notebook of lab {other}; expected one of lab {work.lab.slug}. To check it as what it "
            f"is: inferlab lab check {number} --file {file}"
        )
    if sum("is missing" in note for note in submission.notes) > 1:
        number = work.lab.slug.split("_")[0]
        submission.notes.append(
            f"to put back what is missing, and keep what you wrote: inferlab lab reset {number} --repair"
        )
    return submission


def check_submission(lab: Lab, submission: Submission, on_start: Callable[[Cell], None] = lambda cell: None) -> Result:
    """The visible checks on a submission, in a second process, with the public seed. on_start: before each check."""
    from grader.isolation.launcher import Launcher

    with Launcher(insecure=True) as launcher:  # starts in the background while torch is imported here
        import torch

        from grader.checks import PUBLIC_SECRET
        from grader.examination.attempt import OWN_CALL
        from grader.examination.examiner import Limits, examine

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return examine(
                lab,
                submission,
                launcher,
                secret=PUBLIC_SECRET,
                on_start=on_start,
                skip_hung=True,
                limits=Limits(call=OWN_CALL),
            )
        finally:
            torch.set_num_threads(threads)


def reset_cell(work: Work, cell: str) -> Path | None:
    """Put solution cell `cell` back to the release; returns the file the learner's text was saved to.

    A cell that is gone comes back in its place; then there is no text, and None. Raises LabError, also for a file that
    is no notebook: `reset_all` replaces that.
    """
    released = work.lab.cell(cell)
    if released is None or released.kind != "solution":
        known = ", ".join(c.grade_id for c in work.lab.of_kind("solution"))
        raise LabError(f"no cell {cell!r} that you write in this lab; they are: {known}")
    notebook = _readable(work)
    cells: list[Any] = notebook["cells"]
    mine = [raw for raw in cells if _grade_id(raw) == cell]
    kept = None
    if mine:
        kept = next(p for n in range(1, 10000) if not (p := work.path.with_name(f"{cell}.kept{n}.py")).exists())
        workspace.write_atomically(kept, "\n\n".join(_text(raw) for raw in mine).encode())
        for raw in mine:
            raw["source"] = released.source.splitlines(keepends=True)
            raw["outputs"], raw["execution_count"] = [], None
    else:
        order = [c.grade_id for c in work.lab.cells]
        before = set(order[: order.index(cell)])
        place = max((number for number, raw in enumerate(cells, 1) if _grade_id(raw) in before), default=0)
        cells.insert(place, work.lab.notebook["cells"][order.index(cell)])
    text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
    workspace.write_atomically(work.path, text.encode())
    return kept


def reset_all(work: Work) -> Path:
    """Puts the notebook back to what was handed out; returns where the file that was there is now, whatever was in
    it."""
    kept = place_beside(work.path, work.path.read_bytes(), "kept")
    workspace.write_atomically(work.path, work.released.read_bytes())
    return kept


def repair(work: Work) -> tuple[Path, list[str]]:
    """Puts back the lab's own cells that are gone or changed; what the learner wrote stays.

    Returns where the file that was there is now, and what was repaired. Raises LabError where nothing can be read.
    """
    raw = work.path.read_bytes()
    try:
        submission = read_submission(raw, work.lab)
    except Refused as error:
        raise LabError(_unreadable(work, str(error))) from None
    notebook = rebuild(work.lab.notebook, work.lab, submission)
    for cell in notebook["cells"]:
        cell["source"] = _text(cell).splitlines(keepends=True)
    kept = place_beside(work.path, raw, "kept")
    workspace.write_atomically(work.path, (json.dumps(notebook, ensure_ascii=False, indent=1) + "\n").encode())
    return kept, submission.notes


def _readable(work: Work) -> dict[str, Any]:
    """The learner's notebook with a list of cells. Raises LabError, which says what to do."""
    try:
        notebook = json.loads(work.path.read_bytes())
    except (ValueError, RecursionError):
        empty = not work.path.read_bytes().strip(b" \t\r\n\0")
        raise LabError(
            _unreadable(work, "the file is empty" if empty else "it is not JSON, so not a notebook")
        ) from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise LabError(_unreadable(work, "it has no list of cells"))
    return notebook


def _unreadable(work: Work, why: str) -> str:
    number = work.lab.slug.split("_")[0]
    if work.path != _place(work.released):
        return f"{work.path} cannot be read: {why}. Expected a notebook of lab {number}"
    return (
        f"{work.path} cannot be read: {why}. JupyterLab keeps an earlier version in .ipynb_checkpoints, beside it. Or "
        f"begin with a new notebook, and keep this file under another name: inferlab lab reset {number} --all"
    )


def _grade_id(raw: Any) -> str | None:
    """The id of the lab's cell that this is: by its metadata or, where a tool has lost that, by its id."""
    if not isinstance(raw, dict):
        return None
    metadata = raw.get("metadata")
    ours = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    found = ours.get("grade_id") if isinstance(ours, dict) else None
    return found or raw.get("id")


def _other_lab(raw: bytes, lab: Lab) -> str | None:
    """The lab of which a notebook has more cells than of this one: the wrong file was named, or saved here."""
    ids = {known for cell in read_cells(raw, []) for known in (cell.grade_id, cell.cell_id)}
    shared = len(ids & {cell.grade_id for cell in lab.cells})
    for folder in sorted(workspace.labs_root().glob("[0-9]*_*")):
        for path in sorted(folder.glob("*.ipynb")):
            if folder.name != lab.slug and len(ids & {cell.grade_id for cell in load_lab(path).cells}) > shared:
                return folder.name
    return None


def _text(raw: dict[str, Any]) -> str:
    source = raw.get("source", "")
    return source if isinstance(source, str) else "".join(map(str, source))


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
