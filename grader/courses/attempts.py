"""Results of earlier attempts: results/LAB/attempts/RECEIVED/STUDENT.json, kept when a newer submission is graded."""

from __future__ import annotations

import contextlib
import glob
from dataclasses import replace
from pathlib import Path

from grader.courses.recorded import Damaged, damage, read_result
from grader.results.result import Result
from grader.study.workspace_files import write_atomically


def keep_earlier(root: Path, new: Result) -> None:
    """Keeps the present result, if it is of another submission, before `new` takes its place."""
    folder = root / "results" / new.lab
    with contextlib.suppress(OSError, ValueError):  # the first attempt, or a damaged file: nothing to keep
        old = read_result(folder / f"{new.student}.json")
        if old.received not in ("", new.received) and old.status != "machinery":
            write_atomically(folder / "attempts" / old.received / f"{new.student}.json", old.to_json().encode())


def best_earlier(root: Path, lab: str, student: str) -> tuple[float, list[Damaged]]:
    """The most points that the grader gave an earlier attempt, 0 without one; and the attempts that cannot be read."""
    best, damaged = 0.0, []
    for path in sorted((root / "results" / lab / "attempts").glob(f"*/{glob.escape(student)}.json")):
        try:
            best = max(best, read_result(path).earned)
        except (OSError, ValueError) as error:
            found = damage(root, lab, path, error)
            # It was an attempt that another one replaced: no run makes it again.
            damaged.append(replace(found, repair="restore it from a backup, or delete it: it counts nothing"))
    return best, damaged
