"""Where our examiner and our feedback page enter nbgrader: a preprocessor for autograding and an exporter for feedback.

nbgrader's own Execute runs tests inside the learner's process and takes silence for success. `ExaminerStep` stands in
its place, and writes into every check's cell what nbgrader's own scoring reads: a number of points, never stderr.
"""

from __future__ import annotations

import functools
import json
import secrets
from pathlib import Path
from typing import Any

from nbconvert.exporters import Exporter
from nbgrader.preprocessors import (
    AssignLatePenalties,
    CheckCellMetadata,
    GetGrades,
    NbGraderPreprocessor,
    SaveAutoGrades,
)

from grader.examiner import check_result, examine
from grader.intake import read_submission
from grader.lab import Lab, load_lab
from grader.launcher import Launcher
from grader.results import Result


class ExaminerStep(NbGraderPreprocessor):
    """Runs the examiner on one submission and writes results/LAB/STUDENT.json and the scores into the cells."""

    def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
        student, lab_slug, name = (resources["nbgrader"][key] for key in ("student", "assignment", "notebook"))
        root = Path.cwd()  # nbgrader's converters work in the course folder
        lab = load_lab(root / "solutions" / lab_slug / f"{name}.ipynb")
        intake = read_intake(root, lab_slug, student)
        if intake.get("refused"):
            result = refused_result(lab, intake["refused"])
        else:
            submission = read_submission(json.dumps(nb).encode(), lab)
            submission.notes = list(intake.get("notes", []))
            result = examine(lab, submission, shared_launcher(), secret=run_secret())
        result.student, result.received = student, intake.get("received", "")
        save_result(root, result)
        write_scores(nb, result)
        return nb, resources


class FeedbackExporter(Exporter):
    """Exports an autograded notebook, with the gradebook's scores in it, as the page a learner reads."""

    def _file_extension_default(self) -> str:
        return ".html"

    def from_notebook_node(self, nb: Any, resources: Any = None, **kw: Any) -> tuple[str, Any]:
        from grader.feedback import feedback_page

        nb, resources = super().from_notebook_node(nb, resources, **kw)
        student, lab_slug = (resources["nbgrader"][key] for key in ("student", "assignment"))
        return feedback_page(nb, load_result(Path.cwd(), lab_slug, student)), resources


def autograde_steps() -> list[type]:
    """nbgrader's autograde preprocessors with Execute replaced; its output filters have nothing left to filter."""
    return [ExaminerStep, SaveAutoGrades, AssignLatePenalties, CheckCellMetadata]


def feedback_steps() -> list[type]:
    return [GetGrades]


@functools.cache
def shared_launcher() -> Launcher:
    """The one warm process of this run; started at the first submission, ended with this process."""
    import atexit

    import torch

    torch.set_num_threads(1)  # the checks' results shall not depend on how many cores an instructor has
    launcher = Launcher()
    launcher.start()
    atexit.register(launcher.close)
    return launcher


@functools.cache
def run_secret() -> bytes:
    """The secret seed of this run: the same for all submissions, so that they meet the same inputs."""
    return secrets.token_bytes(16)


def write_scores(nb: Any, result: Result) -> None:
    """Put each check's points into its cell in the one form nbgrader reads as a partial score."""
    from nbformat.v4 import new_output

    by_id = {check.grade_id: check for check in result.checks}
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = []
        check = by_id.get(cell.metadata.get("nbgrader", {}).get("grade_id"))
        if check is not None:
            text = f"{check.status}: {check.property}\n{check.message}\n"
            cell.outputs = [
                new_output("stream", name="stdout", text=text),
                new_output("execute_result", data={"text/plain": str(check.earned)}, execution_count=1),
            ]
            cell.execution_count = 1


def refused_result(lab: Lab, reason: str, status: str = "refused") -> Result:
    """A result in which no check earned anything, for a submission that could not be examined."""
    checks = [check_result(cell, status, reason) for cell in lab.of_kind("check")]
    return Result(lab=lab.slug, points=lab.points, checks=checks)


def read_intake(root: Path, lab: str, student: str) -> dict[str, Any]:
    """What intake recorded for a submission: received (SHA-256), refused (reason or ""), notes."""
    path = root / "submitted" / student / lab / "intake.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def result_path(root: Path, lab: str, student: str) -> Path:
    return root / "results" / lab / f"{student}.json"


def save_result(root: Path, result: Result) -> None:
    path = result_path(root, result.lab, result.student)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result.to_json(), "utf-8")


def load_result(root: Path, lab: str, student: str) -> Result:
    """The recorded result of a submission. Raises OSError when there is none."""
    from grader.results import result_from_json

    return result_from_json(result_path(root, lab, student).read_text("utf-8"))
