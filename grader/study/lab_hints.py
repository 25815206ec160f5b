"""A check's hints, one at a time: a question, a hint, and after some tries the property explained on an example."""

from __future__ import annotations

from dataclasses import dataclass

from grader.labs.lab import Cell, Lab, LabError
from grader.study.lab_tries import TRIES, Tries, read_tries, record_asked


@dataclass(frozen=True)
class Step:
    """One hint. opens: what is still missing before it is shown, or ""."""

    title: str
    text: str
    opens: str = ""


def steps(check: Cell, tries: Tries) -> list[Step]:
    """All hints of a check, in order; the text of one that is not open yet is not in it."""
    found = [Step(title, text) for title, text in (("Question", check.question), ("Hint", check.hint)) if text]
    if check.explanation:
        count = len(tries.tried)
        missing = "" if count >= TRIES else f"opens after {TRIES} different tries at this check; so far: {count}"
        found.append(Step("Explanation", "" if missing else check.explanation, missing))
    return found


def next_hint(lab: Lab, wanted: str) -> str:
    """The hints of a check asked for so far, and the next one, as text. Raises LabError for an unknown check."""
    check = check_of(lab, wanted)
    tries = read_tries(lab.slug).get(check.grade_id, Tries())
    known = steps(check, tries)
    shown = [step for step in known[: tries.asked + 1] if not step.opens]
    lines = [f"{check.grade_id}: {check.property_text}", *(f"{step.title}: {step.text}" for step in shown)]
    if problem := record_asked(lab.slug, check.grade_id, len(shown)):
        lines.append(f"Note: {problem}")
    later = known[len(shown) :]
    if not later:
        lines.append("There is no further hint.")
    elif later[0].opens:
        lines.append(f"{later[0].title}: {later[0].opens}.")
    else:
        lines.append("For the next step, ask again.")
    return "\n".join(lines)


def check_of(lab: Lab, wanted: str) -> Cell:
    """The check `wanted`, which may be named without `check_`."""
    for name in (wanted, f"check_{wanted}"):
        if (cell := lab.cell(name)) is not None and cell.kind == "check":
            return cell
    known = ", ".join(cell.grade_id for cell in lab.of_kind("check"))
    raise LabError(f"no check {wanted!r} in lab {lab.slug}; its checks: {known}")
