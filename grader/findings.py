"""What a doctor found: one row per property, and the table of them. `inferlab doctor`, `inferlab grade doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.table import Table

Verdict = Literal["ok", "info", "warn", "fail"]
COLOURS: dict[Verdict, str] = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Row:
    """One finding. advice: what to do about a warning or a failure."""

    name: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


def table(rows: list[Row], title: str) -> Table:
    """The findings as a table; what to do about them is not in it."""
    made = Table("", "what", "found", title=title, title_justify="left")
    for row in rows:
        made.add_row(f"[{COLOURS[row.verdict]}]{row.verdict}[/]", row.name, row.found.replace("[", r"\["))
    return made
