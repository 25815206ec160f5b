"""Which known mistake fails exactly the checks that a student failed.

A lab's mutants (`tests/labs/NN_slug/mutants/NAME.py`) each hold one realistic fault and say which checks it fails. The
course folder gets that table when a lab is released, as `misconceptions/NN_slug.json`; it is not beside the solution,
from where nbgrader would copy it into the release.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grader.course import CourseError
from grader.labs.convention import Option, applied_where_touched
from grader.labs.lab import LabError, comment_text
from grader.labs.percent_file import percent_cells_of
from grader.results.result import Result

TRIED = ("failed", "timed out", "killed for memory", "crashed")


@dataclass(frozen=True)
class Misconception:
    """A fault in words, and the checks that it fails and no others."""

    name: str
    fault: str
    fails: tuple[str, ...]


def misconceptions_of(mutants: Path, options: Iterable[Option] = ()) -> list[Misconception]:
    """The mutants in a folder, from their headers. Raises LabError for one without `# fault:` and `# fails:`.

    Mutants whose fault lies where an option of a private course changes the solution are left out: what they do may be
    wrong for other reasons there, or just what the course asks for.
    """
    found, chosen = [], list(options)
    for path in sorted(mutants.glob("*.py")):
        header, *code = re.split(r"^(?=# %%)", path.read_text("utf-8"), maxsplit=1, flags=re.MULTILINE)
        if chosen and not _fits(percent_cells_of("".join(code), path.name), chosen):
            continue
        fault, fails = comment_text(header, "fault"), comment_text(header, "fails")
        if not fault or not fails.strip():
            raise LabError(f"{path.name}: needs '# fault: ...' and '# fails: check, check'")
        found.append(Misconception(path.stem, fault, tuple(sorted(re.split(r"[,\s]+", fails.strip())))))
    return found


def _fits(cells: Iterable[dict[str, Any]], options: Sequence[Option]) -> bool:
    for cell in cells:
        grade_id = cell["metadata"]["nbgrader"]["grade_id"]
        try:
            applied_where_touched(grade_id, cell["source"], options)
        except LabError:
            return False
    return True


def write_misconceptions(lab_source: Path, tests_folder: Path, target: Path, options: Iterable[Option] = ()) -> int:
    """Writes the table of lab `solutions/NN_slug/SLUG.py` to target/NN_slug.json at a release; returns its length.

    tests_folder holds NN_slug/mutants; target is the course's folder `misconceptions`; options: see
    `misconceptions_of`. Nothing is written where there are no mutants. Raises LabError.
    """
    slug = lab_source.parent.name
    table = misconceptions_of(tests_folder / slug / "mutants", options)
    if not table:
        return 0
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(one) for one in table], ensure_ascii=False, indent=1) + "\n"
    (target / f"{slug}.json").write_text(text, "utf-8")
    return len(table)


def read_misconceptions(root: Path, slug: str) -> list[Misconception]:
    """A course's table of a lab: its own, or the checkout's where it has none; empty where there is neither."""
    from grader.study.workspace import data_root

    path = root / "misconceptions" / f"{slug}.json"
    if not path.exists():
        return misconceptions_of(data_root() / "tests" / "labs" / slug / "mutants")
    try:
        table = json.loads(path.read_text("utf-8"))
        return [Misconception(one["name"], one["fault"], tuple(one["fails"])) for one in table]
    except (ValueError, KeyError, TypeError) as error:
        raise CourseError(f"{path} is damaged ({type(error).__name__}); release {slug} again") from error


def failed_checks(result: Result) -> tuple[frozenset[str], frozenset[str]]:
    """(checks that were tried and failed, checks that could not be tried: not written, not run, refused)."""
    tried = frozenset(check.grade_id for check in result.checks if check.status in TRIED)
    passed = frozenset(check.grade_id for check in result.checks if check.status == "passed")
    return tried, frozenset(check.grade_id for check in result.checks) - tried - passed


def failed_on_property(result: Result) -> frozenset[str]:
    """The failed checks that said what is wrong with a result. An endless loop, a crash, an exception in the student's
    code or a cell that does not run says nothing of what was understood.
    """
    no_result = re.compile(r"your code raised |\S+ is not defined")
    return frozenset(check.grade_id for check in result.checks
                     if check.status == "failed" and not no_result.match(check.message))  # fmt: skip


def explanations(result: Result, known: Iterable[Misconception]) -> list[Misconception]:
    """The misconceptions that fail exactly the checks that this submission failed on a property, as far as the others
    could be tried.
    """
    tried, untried = failed_checks(result)
    wrong = failed_on_property(result)
    untried |= tried - wrong
    return [one for one in known if wrong and frozenset(one.fails) - untried == wrong]
