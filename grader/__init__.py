"""The autograder, the learner's workspace, the quiz player and the command line."""

from __future__ import annotations


def check() -> None:
    """In a lab's notebook: run the lab's checks on what you have executed so far, as `inferlab lab check` does."""
    from grader.notebook import check_this_notebook

    check_this_notebook()


def hint(check: str = "") -> None:
    """In a lab's notebook: the next hint for a check, or for the one that did not pass last."""
    from grader.notebook_checks import print_hint

    print_hint(check)


def show_checks() -> None:
    """In a lab's notebook: from now on, what a check found is shown below its cell, and a loop without end is ended."""
    from grader.notebook_checks import install

    install()
