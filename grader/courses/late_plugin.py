"""nbgrader's plugin for late penalties, called when a submission is graded: it applies the course's late policy."""

from __future__ import annotations

from pathlib import Path

from nbgrader.plugins import LateSubmissionPlugin

from grader.courses.late import lateness, read_policy


class CourseLatePolicy(LateSubmissionPlugin):
    """`late.yaml` of the course as nbgrader's late-submission plugin."""

    def late_submission_penalty(self, student_id: str, score: float, total_seconds_late: float) -> float | None:
        step = self.parent  # nbgrader's AssignLatePenalties, with its gradebook open
        submission = step.gradebook.find_submission(step.assignment_id, student_id)
        root = Path.cwd()  # nbgrader's converters work in the course folder
        return lateness(read_policy(root), step.assignment_id, submission, root).penalty or None
