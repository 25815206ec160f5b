"""The autograder, the learner's workspace, the quiz player and the command line."""

from __future__ import annotations


def check() -> None:
    """In a lab's notebook: run the lab's checks on what you have executed so far, as `inferlab lab check` does."""
    from grader.notebook import check_this_notebook

    check_this_notebook()
