"""A line of the GPU bench's table: what we reached, beside the best peer, the limit of this machine, and the goal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

COLUMNS = "| metric | ours | best peer | limit | % of limit | goal |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Goal:
    """A goal from the project's list, and what would be more than it."""

    value: float
    unit: str
    stretch: float | None = None


@dataclass(frozen=True)
class Row:
    """A row. ours: median, min, max, runs, in `unit`. limit: the most of any program, by the limits measured in this
    run.

    peer: its name, and what it reached in the same unit and work. goal, stretch: the project's aims, in the unit; or in
    percent of the limit where goal_unit says so. problem: why there is no figure: an error, or the time was up; or what
    is wrong with the figure that there is.
    """

    metric: str
    unit: str = ""
    ours: dict[str, float] | None = None
    limit: float | None = None
    goal: float | None = None
    stretch: float | None = None
    goal_unit: str = ""
    peer: tuple[str, float] | None = None
    less_is_better: bool = False
    note: str = ""
    problem: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def percent_of_limit(self) -> float | None:
        if self.ours is None or not self.limit or not self.ours["median"]:
            return None
        share = self.ours["median"] / self.limit
        return 100 / share if self.less_is_better else 100 * share

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"percent_of_limit": self.percent_of_limit}


def from_json(row: dict[str, Any]) -> Row:
    fields = {name: value for name, value in row.items() if name != "percent_of_limit"}
    return Row(**fields | {"peer": tuple(row["peer"]) if row.get("peer") else None})


def cells(row: Row) -> list[str]:
    """The cells of a row: metric, ours with its range, best peer, limit, % of limit, goal."""
    goal = "-"
    if row.goal is not None:
        sign = "≤ " if row.less_is_better and not row.goal_unit else ""
        goal = f"{sign}{number(row.goal)} {row.goal_unit or row.unit}".rstrip()
        goal += f", stretch {number(row.stretch)}" if row.stretch is not None else ""
        goal += f" ({row.note})" if row.goal_unit and row.note else ""
    if row.ours is None:
        return [row.metric, row.problem or "nothing was measured", "-", "-", "-", goal]
    median, least, most = (number(row.ours[name]) for name in ("median", "min", "max"))
    return [
        row.metric, f"{median} {row.unit} ({least}-{most})",
        "-" if row.peer is None else f"{row.peer[0]} {number(row.peer[1])}",
        "-" if row.limit is None else number(row.limit),
        "-" if row.percent_of_limit is None else f"{row.percent_of_limit:.0f} %", goal,
    ]  # fmt: skip


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table as lines of Markdown. A bar in an error's text would end its cell: it becomes a slash."""
    yield COLUMNS
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells(row))} |"


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown: what a reader must know of a figure beyond the table."""
    for row in rows:
        said = [row.problem] * (row.ours is not None) + [row.note] * (not row.goal_unit)
        said += [f"{peer} did not run: {error}" for peer, error in row.detail.get("peer_errors", {}).items()]
        said += [f"{late}: with the host's time, longer than the pause" for late in row.detail.get("late", [])]
        if any(said):
            yield f"- {row.metric}: {'; '.join(filter(None, said))}"


def number(value: float) -> str:
    """The number with three digits at least, thousands with commas."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
