"""What a learner has tried at each check, and which hints were asked for: a file of JSON lines in their data folder.

{"v": 1, "lab": "02_kv_cache", "check": "check_mask", "time": "2026-11-25T16:40:00+00:00", "tried": "3f0a..."}
{"v": 1, "lab": "02_kv_cache", "check": "check_mask", "time": "2026-11-25T16:41:00+00:00", "asked": 2}

tried: a hash of the code that the check needs, without its comments and layout, so that running it again is not another
try; asked: how many steps of the check's hints had been shown then. Nothing in it is ever rewritten.
"""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from chapters.learner_data import append_record, data_folder
from grader.examination.cell_source import plain_python, stub_source
from grader.examination.needed import needed_cells
from grader.examination.submission import Submission, learner_cells
from grader.labs.lab import Cell, Lab
from grader.results.result import Result

FILE_NAME = "lab_tries.jsonl"
VERSION = 1
TRIES = 3  # different ones, before a check's property is explained
_TRIED = ("failed", "timed out", "killed for memory", "crashed")


@dataclass
class Tries:
    """What was tried at one check. tried: hashes of code; asked: steps of the hints that were shown."""

    tried: set[str] = field(default_factory=set)
    asked: int = 0


def log_path() -> Path:
    return data_folder() / FILE_NAME


def read_tries(lab: str) -> dict[str, Tries]:
    """The tries by check of this lab. Damaged lines and those of a later version are left out. Raises OSError."""
    found: dict[str, Tries] = {}
    try:
        lines = log_path().read_bytes().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return found
    for line in filter(str.strip, lines):
        try:
            entry = json.loads(line)
            if entry["v"] != VERSION or entry["lab"] != lab:
                continue
            of = found.setdefault(str(entry["check"]), Tries())
            if "tried" in entry:
                of.tried.add(str(entry["tried"]))
            else:
                of.asked = max(of.asked, int(entry["asked"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def record_try(lab: Lab, submission: Submission, check: Cell) -> str:
    """Adds what `check` did not pass with; "" or why it could not be stored. An unchanged stub is no try."""
    code = code_of(lab, submission, check)
    if code is None:
        return ""
    try:
        known = read_tries(lab.slug).get(check.grade_id, Tries())
        return "" if code in known.tried else _append(lab.slug, check.grade_id, tried=code)
    except OSError as error:
        return _problem(error)


def record_tries(lab: Lab, submission: Submission, result: Result) -> str:
    """Adds a try for every check of a result that did not pass; "" or why one could not be stored."""
    by_id = {check.grade_id: check for check in result.checks}
    problems = [
        record_try(lab, submission, cell)
        for cell in lab.of_kind("check")
        if cell.grade_id in by_id and by_id[cell.grade_id].status in _TRIED
    ]
    return next(filter(None, problems), "")


def record_asked(lab: str, check: str, asked: int) -> str:
    return _append(lab, check, asked=asked)


def code_of(lab: Lab, submission: Submission, check: Cell) -> str | None:
    """A hash of the learner's code that `check` needs; None where all of it is as it was handed out."""
    needed = needed_cells(lab, submission, check)
    mine = {name: _meaning(source) for source, name in learner_cells(lab, submission) if name in needed}
    stubs = {cell.grade_id: _meaning(stub_source(cell.source)) for cell in lab.of_kind("solution")}
    written = {name: text for name, text in mine.items() if text != stubs.get(name)}
    return hashlib.sha256(json.dumps(sorted(written.items())).encode()).hexdigest()[:16] if written else None


def _meaning(source: str) -> str:
    try:
        return ast.dump(ast.parse(plain_python(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source.strip()


def _append(lab: str, check: str, **what: object) -> str:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        append_record(log_path(), json.dumps({"v": VERSION, "lab": lab, "check": check, "time": now} | what))
    except OSError as error:
        return _problem(error)
    return ""


def _problem(error: OSError) -> str:
    return f"what you tried is not kept, and explanations stay closed: {log_path()}: {error.strerror or error}"
