"""`grader.check()`: the same result as `inferlab lab check`, from inside a notebook, without saving it first.

What counts is what was executed: for each part the last executed cell that defines it. It goes through the same
examiner as a saved notebook.
"""

from __future__ import annotations

from collections.abc import Sequence

from grader.bootstrap import FIRST_LINE
from grader.examination.cell_source import plain_python
from grader.examination.submission import Added, Submission
from grader.labs.lab import Lab, LabError, comment_text, defined_names, load_lab, split_hidden, without_helps


def check_this_notebook() -> None:
    """Find out which lab is open, check it, and show the result. Raises LabError outside a lab's notebook."""
    from IPython.display import display
    from rich.console import Console

    from grader.study import lab_hints, lab_log, lab_tries, lab_work
    from grader.study.milestone import milestone
    from grader.study.show import notebook_view, telling

    history = executed_cells()
    lab = which_lab(known_labs(), history)
    submission = submission_from_history(lab, history)
    with telling(Console(force_terminal=False, force_jupyter=False)) as on_start:
        result = lab_work.check_submission(lab, submission, on_start)
    problem = lab_log.record(result) or lab_tries.record_tries(lab, submission, result)
    tries = lab_tries.read_tries(lab.slug)
    steps = {cell.grade_id: lab_hints.steps(cell, tries.get(cell.grade_id, lab_tries.Tries()))
             for cell in lab.of_kind("check")}  # fmt: skip
    display(notebook_view(result, lab.slug.split("_")[0], steps))
    if result.status == "passed":
        print("\n" + milestone(lab, submission))
    if other := other_checks(lab, history):
        print(f"Note: of the checks you ran, {other} are not those of the release: edited, or another course's.")
        print("Did the notebook come in a bundle? Then set INFERLAB_HOME to the folder you unpacked, and start again.")
    if problem:
        print(f"Note: {problem}")


def known_labs() -> list[Lab]:
    """The labs of this course."""
    from grader.study import workspace

    return [load_lab(path) for path in sorted(workspace.labs_root().glob("[0-9]*_*/*.ipynb"))]


def executed_cells() -> list[str]:
    """The sources of the cells executed in this notebook, in order. Raises LabError outside a notebook."""
    try:
        from IPython import get_ipython
    except ModuleNotFoundError:
        get_ipython = None
    shell = get_ipython() if get_ipython is not None else None
    if shell is None:
        raise LabError("grader.check() works inside a notebook; in a terminal: inferlab lab check 02")
    return [source for source in shell.user_ns.get("In", []) if source.strip()]


def other_checks(lab: Lab, history: Sequence[str]) -> int:
    """How many executed cells are checks that are not this lab's: edited, or those of another course's release."""
    ours = {bare(cell.source) for cell in lab.of_kind("check")}
    return len({bare(source) for source in history if comment_text(source, "property")} - ours)


def bare(source: str) -> str:
    """A cell's text as a learner has it, whatever the date of the release."""
    return without_helps(split_hidden(source)[0]).strip()


def which_lab(labs: Sequence[Lab], history: Sequence[str]) -> Lab:
    """The lab whose graded names were defined most. Raises LabError when none was."""
    defined = {name for source in history for name in defined_names(plain_python(source))}
    best = max(labs, key=lambda lab: len(defined.intersection(lab.graded_names)), default=None)
    if best is None or not defined.intersection(best.graded_names):
        raise LabError("no part of a lab was executed in this notebook yet: run the cells you have written, then check")
    return best


def submission_from_history(lab: Lab, history: Sequence[str]) -> Submission:
    """The executed cells as a submission: the lab's own cells are dropped, other cells are added ones."""
    submission = Submission()
    released = {bare(cell.source) for cell in lab.cells if cell.kind != "solution"}
    place: str | None = None
    for source in history:
        names = set(defined_names(plain_python(source)))
        cell = next((c for c in lab.of_kind("solution") if names.intersection(c.names)), None)
        own = next((c for c in lab.cells if bare(c.source) == bare(source)), None)
        if cell is not None:
            place = cell.grade_id
            submission.answers[cell.grade_id] = source
        elif bare(source) in released:
            place = own.grade_id if own is not None else place
        elif "grader.check(" not in source and not source.startswith(FIRST_LINE):  # bootstrap: of any version
            # Run again after an edit, a cell replaces what it was before.
            submission.added = [a for a in submission.added if not (names and names <= set(defined_names(a.source)))]
            submission.added.append(Added(place, "code", source))
    return submission
