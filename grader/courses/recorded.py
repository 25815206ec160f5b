"""Results as they lie in results/LAB/STUDENT.json. A damaged file costs its own student's part of a batch.

Disks fill up, editors and copies go wrong: what is read is held to the types that `Result` declares, so that nothing
past this file meets a value that it cannot work with.
"""

from __future__ import annotations

import json
import shlex
import stat
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from grader.results.result import STATUSES, CheckResult, Result

MAX_BYTES = 32 << 20  # of one result, which holds text of bounded length; lists of up to some thousand lines
LARGEST = 1e9  # points or seconds
_DERIVED = {"earned", "status"}  # that `Result.to_json` adds
_LISTS = {"checks": dict, "notes": str, "flags": str}


@dataclass(frozen=True)
class Damaged:
    """A result that cannot be read. path: from the course folder; why: what is wrong with it; repair: what to do."""

    student: str
    path: str
    why: str
    repair: str

    def __str__(self) -> str:
        return f"{self.student}: {self.path} is damaged ({self.why}); {self.repair}"


@dataclass(frozen=True)
class Recorded:
    """What the grader recorded of a lab, by student, and the files that cannot be read."""

    results: dict[str, Result]
    damaged: tuple[Damaged, ...] = ()


def recorded(root: Path, slug: str) -> Recorded:
    """All results of a lab."""
    found: dict[str, Result] = {}
    damaged = []
    for path in sorted((root / "results" / slug).glob("*.json")):
        try:
            found[path.stem] = read_result(path)
        except FileNotFoundError:  # forgotten since it was listed
            continue
        except (OSError, ValueError) as error:
            damaged.append(damage(root, slug, path, error))
    return Recorded(found, tuple(damaged))


def state(student: str, result: Result | None, damaged: Iterable[Damaged]) -> str:
    """A result's status, or the reason why there is none."""
    if result is not None:
        return result.status
    return "damaged result" if any(one.student == student for one in damaged) else "not graded"


def damage(root: Path, slug: str, path: Path, error: Exception) -> Damaged:
    """The damage of a student's file that raised `error` when it was read."""
    student, name = path.stem, path.relative_to(root).as_posix()
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    again = f"grade it again: inferlab grade run {slug} --student {shlex.quote(student)}"
    if not (root / "submitted" / student / slug).is_dir():
        again = f"nobody of that name handed in: delete {name}"
    elif path.is_dir():
        again = f"move that folder away and {again}"
    return Damaged(student, name, why or type(error).__name__, again)


def read_result(path: Path) -> Result:
    """The result in a file. Raises OSError where there is none, ValueError for anything else than a whole result."""
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise ValueError("not a file")
    if state.st_size > MAX_BYTES:
        raise ValueError(f"{state.st_size >> 20} MiB, and a result has at most {MAX_BYTES >> 20}")
    try:
        data = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("empty" if not state.st_size else "not JSON, or only a part of it") from None
    values = _checked(data, Result, _DERIVED, "the result")
    return Result(**{**values, "checks": [_check(check) for check in values.get("checks", [])]})


def _check(data: Any) -> CheckResult:
    check = CheckResult(**_checked(data, CheckResult, set(), "a check"))
    if check.status not in STATUSES:
        raise ValueError(f"a check has the unknown status {check.status[:40]!r}")
    return check


def _checked(data: Any, kind: type[Result | CheckResult], also: set[str], what: str) -> Mapping[str, Any]:
    """The fields of `kind` in a JSON object, each with its type. Raises ValueError."""
    expected = {field.name: str(field.type) for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
    if not isinstance(data, dict) or not needed | also <= set(data) <= expected.keys() | also:
        raise ValueError(f"{what} does not have the fields of a result")
    values = {name: data[name] for name in expected if name in data}  # an older version may have had fewer
    for name, value in values.items():
        declared = expected[name]
        if declared == "float":
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
        elif declared == "str":
            fits = isinstance(value, str)
        else:
            fits = isinstance(value, list) and all(isinstance(one, _LISTS[name]) for one in value)
        if not fits:
            raise ValueError(f"{name} of {what} is {type(value).__name__}, expected {declared}")
    return values
