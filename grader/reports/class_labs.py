"""All released labs of a course, each with what counts of it. A lab that cannot be read costs the others nothing."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

from grader.course import CourseError, released_labs
from grader.courses.recorded import Recorded, recorded, state
from grader.courses.scores import Score, scores
from grader.results.shown_text import shown_line


@dataclass(frozen=True)
class ClassLab:
    """One lab of the class, by student: what counts, and what the grader saw. problem: why the lab cannot be read."""

    slug: str
    scores: dict[str, Score] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=lambda: Recorded({}))
    problem: str = ""

    def state(self, student: str) -> str:
        return state(student, self.recorded.results.get(student), self.recorded.damaged)

    def unusual(self, student: str) -> str:
        """The student's status where a person should know of it; else nothing."""
        found = self.state(student)
        return "" if found in ("passed", "failed", "not graded") else found

    @property
    def points(self) -> float:
        return max((one.max_score for one in self.scores.values()), default=0.0)

    @property
    def totals(self) -> list[float]:
        return [one.total for one in self.scores.values() if one.total is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.totals) if self.totals else None


def class_labs(root: Path) -> list[ClassLab]:
    """The labs that are released, in their order."""
    found = []
    for slug in released_labs(root):
        try:
            by_student = {one.student: one for one in scores(root, slug)}
            found.append(ClassLab(slug, by_student, recorded(root, slug)))
        except (CourseError, OSError, ValueError) as error:
            found.append(ClassLab(slug, problem=shown_line(str(error))))
    return found
