"""The autograder, the learner's workspace, the quiz player and the command line."""

# Any Python must be able to read this file, to say that it is too old: its types stand in comments.
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("inferlab: error: Python 3.11 or later is needed, and this is " + sys.version.split()[0])


def check():  # type: () -> None
    """Runs the lab's checks on what you have executed so far in its notebook, as `inferlab lab check` does."""
    from grader.notebook import check_this_notebook

    check_this_notebook()


def hint(check=""):  # type: (str) -> None
    """Shows the next hint for a check, or for the one that did not pass last, in a lab's notebook."""
    from grader.notebook_checks import print_hint

    print_hint(check)


def show_checks():  # type: () -> None
    """Makes a lab's notebook show what a check found below its cell, and end a loop without end, from now on."""
    from grader.notebook_checks import install

    install()
