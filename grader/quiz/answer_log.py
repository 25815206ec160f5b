"""The log of answers: one file of JSON lines to which every player appends. Nothing in it is ever rewritten.

    {"v": 1, "key": "02_kv_cache/pairs-ratio", "time": "2026-11-20T16:17:45.123456+00:00",
     "verdict": "right", "score": 1.0, "seed": 7, "seconds": 41.5}

A record that a kill cut short costs only itself, and players that write at the same time need no lock.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from chapters.learner_data import append_record, data_folder

FILE_NAME = "reviews.jsonl"
VERSION = 1

Grade = Literal["wrong", "partly", "right"]
_GRADES = get_args(Grade)
_DAMAGED = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
_YEARS = range(2020, 2200)  # outside of these a clock or a line is broken, and dates computed from it would overflow


class ReviewError(RuntimeError):
    """The log of answers cannot be used: says which file, why, and what to do."""


@dataclass(frozen=True)
class Answer:
    """One answer of the learner. seed: of the draw, so that the same question can be made again; seconds: taken."""

    key: str  # chapter's folder / item id
    time: datetime  # UTC
    verdict: Grade
    score: float  # 0 to 1
    seed: int
    seconds: float


def log_path() -> Path:
    """The log in the learner's data folder."""
    return data_folder() / FILE_NAME


def read_answers(path: Path) -> tuple[list[Answer], int]:
    """All answers by time, and how many lines were damaged and left out. No file: no answers.

    Raises ReviewError if the file cannot be read, or holds a line of a newer version of this course.
    """
    try:
        lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise ReviewError(
            f"cannot read {path}: {error.strerror or error}. Make it readable, or set INFERLAB_DATA to another folder"
        ) from None
    answers, damaged = [], 0
    for line in filter(str.strip, lines):
        try:
            answers.append(_answer(json.loads(line), path))
        except _DAMAGED:
            damaged += 1
    # Two players write in the order in which they end a question, and clocks get corrected.
    return sorted(answers, key=lambda answer: answer.time), damaged


def append_answer(answer: Answer, path: Path) -> None:
    """Adds one answer and waits until it is on the disk. Raises ReviewError if it cannot be written."""
    entry = {
        "v": VERSION,
        "key": answer.key,
        "time": answer.time.astimezone(UTC).isoformat(timespec="microseconds"),
        "verdict": answer.verdict,
        "score": round(answer.score, 4),
        "seed": answer.seed,
        "seconds": round(answer.seconds, 1),
    }
    _answer(entry, path)  # what could not be read back is a fault of the caller, found now
    try:
        append_record(path, json.dumps(entry))
    except OSError as error:
        raise ReviewError(f"the answer was not stored: {path}: {error.strerror or error}. {_WAY_OUT}") from None


_WAY_OUT = "Make room there, or set INFERLAB_DATA to another folder"


def _answer(entry: Any, path: Path) -> Answer:
    """The answer of one line. Raises ReviewError for a newer one, and what `_DAMAGED` lists for a damaged one."""
    if int(entry["v"]) > VERSION:
        raise ReviewError(
            f"{path} was written by a newer version of the course (format {entry['v']}, this one reads {VERSION}). "
            "Update it (pip install --upgrade inferlab), or set INFERLAB_DATA to another folder to begin afresh"
        )
    answer = Answer(
        key=str(entry["key"]),
        time=datetime.fromisoformat(entry["time"]),
        verdict=entry["verdict"],
        score=float(entry["score"]),
        seed=int(entry["seed"]),
        seconds=float(entry["seconds"]),
    )
    if answer.time.utcoffset() is None or answer.time.year not in _YEARS:
        raise ValueError(f"expected a time with its zone, got {entry['time']!r}")
    if answer.verdict not in _GRADES or not answer.key.isascii() or answer.key.count("/") != 1:
        raise ValueError(f"expected one of {_GRADES} and a key like 02_kv_cache/pairs-ratio, got {entry!r}")
    if not 0 <= answer.score <= 1 or not 0 <= answer.seconds < math.inf:
        raise ValueError(f"expected a score from 0 to 1 and seconds, got {entry!r}")
    return replace(answer, time=answer.time.astimezone(UTC))
