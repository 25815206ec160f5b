"""The benchmark of the widgets moves every control of every widget that redraws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chapters import widgets
from grader import widget_bench


class Counting:
    """Stands in for a view with one control of three values."""

    def __init__(self) -> None:
        self.controls = {"x": self}
        self.min, self.max = 1, 3
        self._value = 2
        self.seen: list[int] = []

    @property
    def value(self) -> int:
        return self._value

    @value.setter
    def value(self, new: int) -> None:
        self._value = new
        self.seen.append(new)


def test_every_control_goes_to_both_ends_and_back_and_the_first_round_does_not_count() -> None:
    view = Counting()
    row = widget_bench._redraws(view, rounds=2)
    assert view.seen == [1, 3, 2] * 3
    assert row["runs"] == 6
    assert 0 <= row["min"] <= row["median"] <= row["max"]


# With controls, and not measured yet: they show records that a chapter makes first.
UNMEASURED = {
    "accept_reject", "batching", "block_table", "chunk_size", "draft_tree", "quiz", "radix_tree", "rank_timeline",
    "schedule", "token_origins",
}  # fmt: skip


def test_every_widget_with_controls_is_measured_or_named_here() -> None:
    views: dict[str, Any] = widget_bench._views()
    folder = Path(widgets.__file__).parent
    with_controls = {path.stem for path in folder.glob("*.py") if "View(" in path.read_text("utf-8")}
    assert set(views) | UNMEASURED == with_controls - {"figure"}
    assert not set(views) & UNMEASURED
    assert all(view.controls for view in views.values())
