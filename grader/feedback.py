"""The page a learner gets back: per check the property, what was seen and the hint. One file, readable on a phone.

Everything a learner or a check wrote is escaped by the template; the page has no script and loads nothing. The source
of a check is not shown, so hidden tests stay hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grader.results import CheckResult, Result

WORDS = {
    "passed": "passed",
    "failed": "not yet",
    "not written": "not written yet",
    "timed out": "did not finish",
    "crashed": "ended its process",
    "not run": "not run",
    "refused": "could not be read",
    "machinery": "not graded: the grader failed, your instructor will look",
}


def feedback_page(nb: Any, result: Result) -> str:
    """HTML for an autograded notebook that carries the gradebook's scores and comments in its cells' metadata."""
    from jinja2 import Environment, StrictUndefined

    cells = [cell for cell in nb.cells if cell.metadata.get("nbgrader", {}).get("grade_id")]
    meta = {cell.metadata.nbgrader["grade_id"]: cell.metadata.nbgrader for cell in cells}
    checks = [_check(check, meta.get(check.grade_id, {})) for check in result.checks]
    answers = [
        {"name": m["grade_id"], "source": cell.source, "comment": m.get("comment"), "score": m.get("score")}
        for cell in cells
        if (m := cell.metadata.nbgrader).get("solution")
    ]
    graded_by_hand = [a["score"] for a in answers if a["score"] is not None]
    text = Path(__file__).with_name("feedback.html").read_text("utf-8")
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(text)
    return template.render(
        result=result,
        checks=checks,
        answers=answers,
        score=sum(check["score"] for check in checks) + sum(graded_by_hand),
        points=sum(check["points"] for check in checks),
    )


def _check(check: CheckResult, meta: dict[str, Any]) -> dict[str, Any]:
    score = meta.get("score", check.earned)
    return {
        "name": check.grade_id,
        "property": check.property,
        "word": WORDS[check.status],
        "passed": check.status == "passed",
        "score": float(check.earned if score is None else score),
        "points": check.points,
        "message": check.message,
        "seen": check.seen.strip(),
        "hint": check.hint,
    }
