"""The autograder, the learner's workspace, the quiz player and the command line."""

# Any Python must be able to read this file, to say that it is too old: its types stand in comments.
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("inferlab: error: Python 3.11 or later is needed, and this is " + sys.version.split()[0])


def check():  # type: () -> None
    """In a lab's notebook: run the lab's checks on what you have executed so far, as `inferlab lab check` does."""
    from grader.notebook import check_this_notebook

    check_this_notebook()


def hint(check=""):  # type: (str) -> None
    """In a lab's notebook: the next hint for a check, or for the one that did not pass last."""
    from grader.notebook_checks import print_hint

    print_hint(check)


def show_checks():  # type: () -> None
    """In a lab's notebook: from now on, what a check found is shown below its cell, and a loop without end is ended."""
    from grader.notebook_checks import install

    install()
