"""Our examiner and our feedback page in nbgrader: a preprocessor for autograding and an exporter for feedback.

nbgrader's own Execute runs tests inside the learner's process and takes silence for success. `ExaminerStep` replaces
it, makes harmless what the formgrader will show, and writes into every check's cell what nbgrader's own scoring reads:
a number of points, never stderr.
"""

from __future__ import annotations

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
from traitlets import Bool

from grader.courses.attempts import keep_earlier
from grader.courses.by_hand import given_by_hand
from grader.courses.disarm import disarm
from grader.courses.recorded import read_result
from grader.results.result import Result, result_from_json
from grader.study.workspace_files import write_atomically
from grader.submissions.history import RECORD
from grader.submissions.receipt import read_record, released, whole


class ExaminerStep(NbGraderPreprocessor):
    """Writes the scores of a submission's result into its cells; examines it first where that has not been done.

    `inferlab grade run` examines many at once and then records. nbgrader's own autograde, from the command line or the
    formgrader, comes here without a result.
    """

    examine = Bool(True, help="Examine what has no result yet, or only a failure of the grader.").tag(config=True)

    def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
        student, lab_slug = (resources["nbgrader"][key] for key in ("student", "assignment"))
        root = Path.cwd()  # nbgrader's converters work in the course folder
        if self.examine:
            result = _finished(root, lab_slug, student) or _examine_now(root, lab_slug, student)
        else:
            result = load_result(root, lab_slug, student)
        disarm(nb, released(root, lab_slug)[1])
        write_scores(nb, result)
        return nb, resources


def _finished(root: Path, lab_slug: str, student: str) -> Result | None:
    """The submission's result, where there is one for what was handed in last."""
    try:
        result = load_result(root, lab_slug, student)
        received = read_intake(root, lab_slug, student).get("received", "")
    except (OSError, ValueError):
        return None
    return result if result.received == received and result.status != "machinery" else None


def _examine_now(root: Path, lab_slug: str, student: str) -> Result:
    from grader.courses.batch import job_of, lab_setup
    from grader.examination.worker import grade_submission

    result = result_from_json(grade_submission(job_of(root, lab_setup(root, lab_slug), student)))
    if result.status == "machinery":
        raise RuntimeError(result.reason)  # nbgrader says so and records nothing
    save_result(root, result)
    return result


class GetGradesByHand(GetGrades):
    """nbgrader's step for scores; it also notes which scores were given by hand, and which are still to be given."""

    def _get_score(self, cell: Any, resources: Any) -> None:
        super()._get_score(cell, resources)
        name = cell.metadata.nbgrader["grade_id"]
        grade = self.gradebook.find_grade(name, self.notebook_id, self.assignment_id, self.student_id)
        cell.metadata.nbgrader["by_hand"] = given_by_hand(grade)
        if grade.manual_score is None and grade.auto_score is None:
            cell.metadata.nbgrader["score"] = None  # where nbgrader says 0


class FeedbackExporter(Exporter):
    """Exports an autograded notebook, with the gradebook's scores in it, as the page a learner reads."""

    def _file_extension_default(self) -> str:
        return ".html"

    def from_notebook_node(self, nb: Any, resources: Any = None, **kw: Any) -> tuple[str, Any]:
        from grader.results.feedback import feedback_page

        nb, resources = super().from_notebook_node(nb, resources, **kw)
        student, lab_slug = (resources["nbgrader"][key] for key in ("student", "assignment"))
        late_penalty = float(resources["nbgrader"].get("late_penalty") or 0.0)
        return feedback_page(nb, load_result(Path.cwd(), lab_slug, student), late_penalty), resources


def autograde_steps() -> list[type]:
    """nbgrader's autograde preprocessors with Execute replaced; its output filters have nothing left to filter."""
    return [ExaminerStep, SaveAutoGrades, AssignLatePenalties, CheckCellMetadata]


def feedback_steps() -> list[type]:
    return [GetGradesByHand]


def write_scores(nb: Any, result: Result) -> None:
    """Put each check's points into its cell in the one form nbgrader reads as a partial score."""
    from nbformat.v4 import new_output

    by_id = {check.grade_id: check for check in result.checks}
    for cell in nb.cells:
        check = by_id.get(cell.metadata.get("nbgrader", {}).get("grade_id"))
        if check is not None:
            text = f"{check.status}: {check.property}\n{check.message}\n"
            cell.outputs = [
                new_output("stream", name="stdout", text=text),
                new_output("execute_result", data={"text/plain": str(check.earned)}, execution_count=1),
            ]
            cell.execution_count = 1


def read_intake(root: Path, lab: str, student: str) -> dict[str, Any]:
    """The record that intake made of a submission: received (SHA-256), refused (reason or ""), notes. Empty where
    intake has not seen it. Raises ValueError where the record is damaged.
    """
    record = read_record(root / "submitted" / student / lab)
    if record and not whole(record):
        raise ValueError(f"submitted/{student}/{lab}/{RECORD} is damaged; inferlab grade run {lab} makes it anew")
    return record


def result_path(root: Path, lab: str, student: str) -> Path:
    return root / "results" / lab / f"{student}.json"


def save_result(root: Path, result: Result) -> None:
    """Write the result as a whole or not at all. That of another submission, which it replaces, is kept."""
    keep_earlier(root, result)
    write_atomically(result_path(root, result.lab, result.student), result.to_json().encode())


def load_result(root: Path, lab: str, student: str) -> Result:
    """The recorded result of a submission. Raises OSError when there is none, ValueError when it is damaged."""
    return read_result(result_path(root, lab, student))
