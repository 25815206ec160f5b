"""The structured result of a submission: one entry per check, and how it was obtained. JSON, for reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

# passed; failed; not written: a stub was reached; timed out; killed for memory; crashed; not run: no time was left;
# refused: not readable; machinery: the grader failed, not the submission, and a person must look.
NO_CELLS = "no cell of this lab was found: is it the right notebook?"  # a note of intake
NO_MARKS = "its cells have lost their ids: what they define was taken for this lab's"  # another one
STATUSES = (
    "passed",
    "failed",
    "not written",
    "timed out",
    "killed for memory",
    "crashed",
    "not run",
    "refused",
    "machinery",
)
# The same as a learner reads them.
WORDS = {
    "passed": "passed",
    "failed": "not yet",
    "not written": "not written yet",
    "timed out": "did not finish in time",
    "killed for memory": "used too much memory",
    "crashed": "ended its process",
    "not run": "not run",
    "refused": "your file could not be read",
    "machinery": "not graded: the grader failed, your instructor will look",
}


@dataclass
class CheckResult:
    """One check. message: what was seen when it failed; seen: what the check printed; seconds: wall-clock."""

    grade_id: str
    points: float
    earned: float
    status: str
    property: str
    message: str = ""
    hint: str = ""
    seen: str = ""
    seconds: float = 0.0


@dataclass
class Result:
    """The result of one submission. notes: what intake repaired, for the learner; flags: what a person should look at,
    for the instructor only; printed: the tail of what the learner's code printed.
    """

    lab: str
    points: float
    secret: str = ""  # hex: repeats the checks' random inputs
    checks: list[CheckResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    printed: str = ""
    seconds: float = 0.0
    student: str = ""
    received: str = ""  # SHA-256 of what was handed in
    lab_version: str = ""  # SHA-256 of the solution notebook whose checks were run

    @property
    def earned(self) -> float:
        return sum(check.earned for check in self.checks)

    @property
    def status(self) -> str:
        """`passed` when all checks passed, `failed`, or the worst that happened and where."""
        for worst in ("machinery", "refused", "timed out", "killed for memory", "crashed"):
            for check in self.checks:
                if check.status == worst:
                    return worst if worst in ("machinery", "refused") else f"{worst} in {check.grade_id}"
        return "passed" if all(check.status == "passed" for check in self.checks) else "failed"

    @property
    def reason(self) -> str:
        """The words with which the status was decided: why a file was refused, what a process died of."""
        name = self.status.split(" in ")[-1]
        for check in self.checks:
            if name in (check.status, check.grade_id) and check.status != "failed":
                return check.message
        return ""

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"earned": self.earned, "status": self.status}, indent=1) + "\n"


def result_from_json(text: str) -> Result:
    """The inverse of `Result.to_json`."""
    data: dict[str, Any] = json.loads(text)
    for derived in ("earned", "status"):
        data.pop(derived)
    return Result(**{**data, "checks": [CheckResult(**check) for check in data["checks"]]})
