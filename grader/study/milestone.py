"""What is shown after a lab's last point: the engine serves a text with the learner's part, and says what that took."""

from __future__ import annotations

from grader.examination.submission import Submission
from grader.labs.lab import Lab


def milestone(lab: Lab, submission: Submission) -> str:
    """What to show once all checks of the lab passed; "" for a lab without a milestone. In a second process."""
    from grader.isolation.launcher import Launcher

    with Launcher(insecure=True) as launcher:
        from grader.checks import PUBLIC_SECRET
        from grader.examination import examiner

        return examiner.milestone(lab, submission, launcher, secret=PUBLIC_SECRET)
