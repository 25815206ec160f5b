"""What is said of a check: its result, the text for the learner, and that text made fit to show.

Nothing here shows the source of a check, and nothing trusts the text it is given.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from grader.labs.lab import Cell
from grader.results.result import CheckResult

MAX_SEEN = 4000  # characters of what a check printed, and of its message


def check_result(cell: Cell, status: str, message: str, seen: str = "", seconds: float = 0.0) -> CheckResult:
    """The result of one check; points are earned by the status `passed` and by nothing else."""
    return CheckResult(
        grade_id=cell.grade_id,
        points=cell.points,
        earned=cell.points if status == "passed" else 0.0,
        status=status,
        property=cell.property_text,
        message=clean(message[: 4 * MAX_SEEN])[:MAX_SEEN],
        hint="" if status == "passed" else cell.hint,
        seen=clean(seen[: 4 * MAX_SEEN])[:MAX_SEEN],
        seconds=round(seconds, 4),
    )


def clean(text: str) -> str:
    """A learner's text without what no file or terminal should get: lone surrogates, control characters, and this
    machine's folders, which warnings of libraries name.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    text = _folders().sub("", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


@functools.cache
def _folders() -> re.Pattern[str]:
    """Matches the folders of Python, of the course and of the current user, at the beginning of a path."""
    found = [*sys.path, *sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, tempfile.gettempdir()]
    found += [os.getcwd(), os.path.expanduser("~"), str(Path(__file__).absolute().parents[2])]
    absolute = {path.rstrip("/") for entry in found for path in (entry, os.path.realpath(entry)) if os.path.isabs(path)}
    longest_first = sorted(absolute - {""}, key=lambda path: (-len(path), path))
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, longest_first))})/")


def explain(error: BaseException, cell: Cell) -> tuple[str, str]:
    """Status and message for an exception that ended a check. Never shows the source of a check."""
    trace = getattr(error, "learner_traceback", "")
    if isinstance(error, NotImplementedError):
        cells = re.findall(r'File "<cell ([^>"]+)>"', trace)
        return "not written", f"{cells[-1] if cells else 'a part that this check needs'} is not written yet"
    try:
        text = str(error)
    except Exception:  # a built-in exception can be made of arguments that it cannot show
        text = "(an exception whose text cannot be read)"
    if isinstance(error, NotDefined):
        return "failed", text
    if hasattr(error, "learner_type"):
        # `unchanging`, which the learner's process calls around their function, says itself what it saw.
        given = error.learner_type == "AssertionError" and "expected " in text and ", saw " in text
        text = text[:MAX_SEEN] if given else f"your code raised {error.learner_type}: {text[:MAX_SEEN]}"
        return "failed", "\n".join(filter(None, [text, own_lines(trace)]))
    if isinstance(error, AssertionError):
        return "failed", text or "the property does not hold"
    return "failed", f"the check could not use what your code gave it: {type(error).__name__}: {text}"


def own_lines(trace: str) -> str:
    """A traceback's text from the learner's first own cell on: what is above it is the call's machinery."""
    start = trace.find('  File "<cell ')
    return trace[start:].rstrip() if start >= 0 else ""


def _stopped(cell: str, text: str) -> str:
    """What a cell stopped with, and what that means for the rest of it."""
    if text.startswith("SystemExit"):
        return f"{cell} ended with sys.exit() or exit(): nothing below that line in it was run. Take it out"
    return f"{cell} stopped with an error, and nothing below that line in it was run:\n{own_lines(text)}"


class Missing:
    """Stands for a graded name that the learner's cells did not define."""

    def __init__(self, name: str, broken: dict[str, str], magic: tuple[str, str] = ("", "")):
        """broken: what cells stopped with, by what a learner knows them by; magic: the cell that defines it, and its
        line that keeps it from running.
        """
        parts = [f"{name} is not defined"]
        if magic[0]:
            parts.append(f"cell {magic[0]} begins with {magic[1]}: it is not run as Python. Take that line out")
        self._text = "\n".join(parts + [_stopped(cell, text) for cell, text in broken.items()])

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotDefined(self._text)

    def __getattr__(self, attribute: str) -> Any:
        raise NotDefined(self._text)


class NotDefined(NameError):
    """A graded name was used that the learner's cells did not define."""
