"""The page a learner gets back: per check the property, what was seen and the hint. One file, readable on a phone.

Everything a learner, a check or an instructor wrote is escaped by the template and goes through `shown`; the page has
no script, loads nothing, and links only to its own headings. The source of a check is not shown, so hidden tests stay
hidden; what intake flagged for the instructor is not shown either.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grader.results.result import NO_CELLS, WORDS, CheckResult, Result
from grader.results.shown_text import MAX_CHARACTERS, shown, shown_line, unfenced

ACCEPTED, GRADED = "accepted by your instructor", "graded by your instructor"
WRONG_FILE = "this file has none of the lab's cells: hand in the notebook of this lab"
MAX_NOTES = 50
MAX_ADDED = 200_000  # characters of added cells that are shown: a page of hundreds of MiB is useless


def feedback_page(nb: Any, result: Result, late_penalty: float = 0.0) -> str:
    """HTML for an autograded notebook that carries the gradebook's scores and comments in its cells' metadata, and
    where a person gave points, `by_hand`.

    late_penalty: points that the gradebook takes off the sum.
    """
    from jinja2 import Environment, StrictUndefined

    meta = {cell.metadata.nbgrader["grade_id"]: cell.metadata.nbgrader for cell in nb.cells if _grade_id(cell)}
    checks = [_check(check, meta.get(check.grade_id, {})) for check in result.checks]
    failing = [check for check in checks if not check["done"]]
    answers = list(_answers(nb))
    by_hand = [answer for answer in answers if answer["points"] is not None]
    score = sum(check["score"] for check in checks) + sum(answer["score"] or 0.0 for answer in by_hand)
    text = Path(__file__).with_name("feedback.html").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text).render(
        lab=shown_line(result.lab),
        student=shown_line(result.student),
        checks=checks,
        answers=answers,
        notes=[shown_line(note) for note in result.notes[:MAX_NOTES] if not (note == NO_CELLS and result.earned)],
        printed=shown(result.printed).strip(),
        score=max(0.0, score - late_penalty),
        points=sum(check["points"] for check in checks) + sum(answer["points"] for answer in by_hand),
        late_penalty=late_penalty,
        passed=sum(check["passed"] for check in checks),
        waiting=sum(answer["score"] is None for answer in by_hand),
        accepted=sum(check["done"] and not check["passed"] for check in checks),
        trouble=_trouble(result) if any(check["unseen"] for check in checks) else None,
        first=next(iter(failing), None),
        wrong_file=WRONG_FILE if NO_CELLS in result.notes else "",
    )


def _cause(check: CheckResult) -> str:
    """What kept the learner's code from being tried at all, or from coming to an end: no hint about the property helps
    before that is mended. "" where the property itself failed.
    """
    if check.status in ("timed out", "killed for memory", "crashed"):
        return check.message
    undefined, _, why = check.message.partition(" is not defined\n")
    return why if check.status == "failed" and undefined.isidentifier() else ""


def _grade_id(cell: Any) -> str:
    return str(cell.metadata.get("nbgrader", {}).get("grade_id") or "")


def _trouble(result: Result) -> tuple[str, str] | None:
    """(what, why) where the whole submission went wrong, not one check."""
    if result.status not in ("refused", "machinery"):
        return None
    return WORDS[result.status], shown(result.reason, 2000) if result.status == "refused" else ""


def _check(check: CheckResult, meta: dict[str, Any]) -> dict[str, Any]:
    score = float(check.earned if meta.get("score") is None else meta["score"])
    by_hand, passed = bool(meta.get("by_hand")), check.status == "passed"
    accepted = by_hand and not passed and score >= check.points > 0
    unseen = check.status in ("refused", "machinery")
    word = ACCEPTED if accepted else GRADED if by_hand and unseen else WORDS[check.status]
    return {
        "name": shown_line(check.grade_id),
        "property": shown_line(check.property, 1000),
        "word": word,
        "passed": passed,
        "done": passed or accepted,  # nothing that the learner is told to do
        "unseen": unseen and not by_hand,
        "score": score,
        "points": check.points,
        "changed_from": check.earned if by_hand and abs(score - check.earned) > 1e-9 else None,
        "message": "" if unseen else shown(check.message).strip(),
        "cause": shown(_cause(check)).strip(),
        "seen": shown(check.seen).strip(),
        "hint": shown_line(check.hint, 1000),
        "seconds": check.seconds,
    }


def _answers(nb: Any) -> Iterator[dict[str, Any]]:
    """The cells the learner wrote, in order: the lab's and added ones. points: None where no person gives points."""
    added = left_out = 0
    left = MAX_ADDED
    for cell in nb.cells:
        meta = cell.metadata.get("nbgrader") or {}
        if not _grade_id(cell):
            added += 1
            left -= min(len(cell.source), MAX_CHARACTERS)
            if left < 0:
                left_out += 1
                continue
            name = f"A cell you added ({added})"
        elif meta.get("solution"):
            name = shown_line(meta["grade_id"])
        else:
            continue
        by_hand = bool(meta.get("grade") and meta.get("solution"))
        score = meta.get("score")
        yield {
            "name": name,
            "source": shown(unfenced(cell.source)).strip("\n"),
            "comment": shown(meta.get("comment") or "", 5000).strip(),
            "score": float(score) if by_hand and score is not None else None,
            "points": float(meta.get("points") or 0.0) if by_hand else None,
        }
    if left_out:
        name = f"{left_out} more cells that you added are not shown"
        yield {"name": name, "source": "", "comment": "", "score": None, "points": None}
