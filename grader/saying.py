"""What commands say where they cannot go on, what they ask, and the command that installs what is missing."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from reference_impl.cli import messages


def stop(problem: object) -> NoReturn:
    """Ends the command with one line and exit status 1. Of a system's error it names the file, and no number."""
    messages.say(messages.described(problem) if isinstance(problem, Exception) else problem)
    raise typer.Exit(1)


def asked(question: str) -> bool:
    """Whether the person at the terminal says yes; no where there is none."""
    return sys.stdin.isatty() and typer.confirm(question)


def why(error: OSError) -> str:
    """The reason why the system refused, in words."""
    return messages.why(error)


def install(extra: str) -> str:
    """The command that adds an extra of this project to the Python that runs now, to be pasted into a shell."""
    return messages.install(extra)
