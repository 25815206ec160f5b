"""A table for a notebook: HTML that scrolls sideways on a narrow page, and aligned text where there is no HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# JupyterLab aligns every cell to the right by a rule that weighs more, hence "important". The colours are JupyterLab's
# own, so that they follow its theme; elsewhere the page's colours show through.
STYLE = (
    "<style>.inferlab-wide { overflow-x: auto; max-width: 100% }"
    " table.inferlab-table { border-collapse: collapse; margin: 0.4em 0; color: var(--jp-content-font-color1, inherit);"
    " font-variant-numeric: tabular-nums }"
    " table.inferlab-table caption { text-align: left; font-weight: 600; padding: 0 0 0.3em; white-space: nowrap;"
    " color: inherit }"
    " table.inferlab-table th, table.inferlab-table td { padding: 0.2em 0.8em; white-space: nowrap;"
    " text-align: left !important; border: 0; border-bottom: 1px solid var(--jp-border-color2, #8888) }"
    " table.inferlab-table th { border-bottom-width: 2px; font-weight: 600 }"
    " table.inferlab-table .number { text-align: right !important }</style>"
)
# A number with what may stand around it: a sign, "about", a unit, a share: "1,234", "-3.5 ms", "~12 %", "4x", "$2.50".
_NUMBER = re.compile(r"[~≈<>≤≥±+\-−$€ ]*[\d.][\d.,_ \u202f]*(?:[eE][+-]?\d+)?\s*\S{0,12}")
_NOTHING = {"", "-", "–", "—", "n/a", "none"}


@dataclass(frozen=True)
class Table:
    """What `table` returns: cells as text, ready to be the last line of a cell."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column whether it holds numbers, and so is aligned to the right."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.headers))]
        return tuple(
            any(map(_NUMBER.fullmatch, column))
            and all(_NUMBER.fullmatch(cell) or cell.lower() in _NOTHING for cell in column)
            for column in columns
        )

    def __repr__(self) -> str:
        lines = [self.headers, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headers))]
        aligned = [
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(line, widths, self.numeric, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*([self.caption] if self.caption else []), *aligned])

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            kinds = [' class="number"' if number else "" for number in self.numeric]
            scope = ' scope="col"' if tag == "th" else ""
            inner = (
                f"<{tag}{scope}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)
            )
            return f"<tr>{''.join(inner)}</tr>"

        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        head = row(self.headers, "th")
        body = "".join(row(cells, "td") for cells in self.rows)
        return (
            f'{STYLE}<div class="inferlab-wide" tabindex="0"><table class="inferlab-table">{caption}'
            f"<thead>{head}</thead><tbody>{body}</tbody></table></div>"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}


def table(rows: Sequence[Sequence[object]], headers: Sequence[str], caption: str = "") -> Table:
    """Rows of cells below headers. An int is shown as 12,345, a float with four digits; format what needs another form.

    A column of numbers, with or without units, is aligned to the right. Raises ValueError for a row of another length.
    """
    for number, cells in enumerate(rows, 1):
        if len(cells) != len(headers):
            raise ValueError(f"row {number}: expected {len(headers)} cells, one for each header, got {len(cells)}")
    return Table(tuple(headers), tuple(tuple(map(_text, cells)) for cells in rows), caption)


def _text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.4g}" if isinstance(cell, float) else str(cell)
