"""The log of lab checks: one file of JSON lines in the learner's data folder. Nothing in it is ever rewritten.

{"v": 1, "lab": "02_kv_cache", "time": "2026-11-20T16:40:00+00:00", "earned": 7.0, "points": 20.0,
 "first": "check_mask"}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from chapters.learner_data import append_record, data_folder
from grader.results.result import Result

FILE_NAME = "lab_checks.jsonl"
VERSION = 1


@dataclass(frozen=True)
class Check:
    """One `inferlab lab check`. points: what the lab had then; first: the first check that did not pass, or ""."""

    lab: str  # its folder
    time: datetime  # UTC
    earned: float
    points: float
    first: str


def log_path() -> Path:
    return data_folder() / FILE_NAME


def record(result: Result, now: datetime | None = None) -> str:
    """Adds a result; returns "", or why it could not be stored. Does not raise: the check itself was made."""
    path = log_path()
    entry = {
        "v": VERSION,
        "lab": result.lab,
        "time": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
        "earned": result.earned,
        "points": result.points,
        "first": next((check.grade_id for check in result.checks if check.status != "passed"), ""),
    }
    try:
        append_record(path, json.dumps(entry))
    except OSError as error:
        return f"this result is not in your progress: {path}: {error.strerror or error}"
    return ""


def read_checks(path: Path | None = None) -> tuple[dict[str, list[Check]], int]:
    """All checks by lab, oldest first, and how many damaged lines were left out. No file: none. Raises OSError."""
    try:
        lines = (path or log_path()).read_bytes().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return {}, 0
    checks: list[Check] = []
    damaged = 0
    for line in filter(str.strip, lines):
        try:
            checks.append(_check(json.loads(line)))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            damaged += 1
    checks.sort(key=lambda check: check.time)
    return {lab: [check for check in checks if check.lab == lab] for lab in {check.lab for check in checks}}, damaged


def _check(entry: dict[str, object]) -> Check:
    time = datetime.fromisoformat(str(entry["time"]))
    earned, points = float(str(entry["earned"])), float(str(entry["points"]))
    if not 0 <= earned <= points < float("inf"):
        raise ValueError(f"expected points from 0 to all, got {earned} of {points}")
    return Check(str(entry["lab"]), time.astimezone(UTC), earned, points, str(entry["first"]))
