"""Reads the cells of a submitted file: what can be repaired without guessing, and what is refused, and why.

Nothing but the cells is used; outputs and everything else in the file are dropped. Limits keep the work for one file
bounded: 64 MiB, and so many brackets and commas that parsing takes no more than about a GiB of memory for a moment.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 << 20
MAX_CELLS = 2500
MAX_SOURCE = 1 << 20  # characters of one cell: enough for a picture in a text
MAX_BRACKETS, MAX_COMMAS = 1 << 20, 6 << 20

# A page in an output is one string, whatever is in it. One that nothing ends reaches to the end: were it no match, the
# search would begin anew at each of its quotes, and take hours for a few MiB.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)

AGAIN = "open the notebook in Jupyter, save it, and hand in the .ipynb file"


class Refused(ValueError):
    """A submission that cannot be read at all; the text is the reason, for the learner to read."""


@dataclass(frozen=True)
class FileCell:
    """One cell of a submitted file, with nothing in it that is not plain text.

    cell_id: nbformat 4.5's id, or where Colab puts it. nbgrader: that part of the metadata, whatever is in it.
    """

    cell_type: str
    cell_id: str | None
    nbgrader: dict[str, Any]
    source: str

    @property
    def grade_id(self) -> str | None:
        grade_id = self.nbgrader.get("grade_id")
        return grade_id if isinstance(grade_id, str) else None


def read_cells(raw: bytes, notes: list[str]) -> list[FileCell]:
    """The cells of a file; what was repaired is added to `notes`. Raises Refused."""
    notebook = _parsed(_text(raw, notes), notes)
    cells = notebook.get("cells")
    if not isinstance(cells, list) and isinstance(notebook.get("worksheets"), list):
        cells = _cells_of_worksheets(notebook["worksheets"])
        notes.append("the notebook is in the old format nbformat 3: its cells were read as those of nbformat 4")
    if not isinstance(cells, list):
        raise Refused(f"the file is not a notebook: it has no list of cells; {AGAIN}")
    if len(cells) > MAX_CELLS:
        raise Refused(f"the notebook has {len(cells)} cells; at most {MAX_CELLS} are read")
    return [_cell(cell, number) for number, cell in enumerate(cells, 1)]


def too_large(size: int) -> str:
    """The reason for refusing a file of `size` bytes, or nothing."""
    if size <= MAX_BYTES:
        return ""
    return f"the file has {size >> 20} MiB; at most {MAX_BYTES >> 20} MiB are read: clear its outputs, and save it"


def _text(raw: bytes, notes: list[str]) -> str:
    if reason := too_large(len(raw)):
        raise Refused(reason)
    if not raw.strip(b" \t\r\n\0"):
        raise Refused("the file is empty")
    for start, what in ((b"PK\x03\x04", "a zip archive"), (b"%PDF", "a PDF"), (b"\x1f\x8b", "a gzip archive")):
        if raw.startswith(start):
            raise Refused(f"the file is not a notebook but {what}: hand in the .ipynb file itself")
    if len(raw) > MAX_BRACKETS and _has_too_many_parts(raw) and _has_too_many_parts(_STRING.sub(b"", raw)):
        raise Refused("the file has too many parts for a notebook: clear its outputs, and save it")
    encoding = "utf-8-sig"
    for bom, name in (
        (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
        (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"),
    ):  # fmt: skip
        if raw.startswith(bom):
            encoding = name
            notes.append(f"the file is written in {name}, not in UTF-8: it was read as that")
            break
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        raise Refused(f"the file is not text in {name} (its byte {error.start + 1} is not); {AGAIN}") from None


def _has_too_many_parts(raw: bytes) -> bool:
    return raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS or raw.count(b",") > MAX_COMMAS


def _parsed(text: str, notes: list[str]) -> dict[str, Any]:
    doubled: set[str] = set()

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            doubled.add("")
        return made

    try:
        # Integers as floats: an integer of 5000 digits makes int() fail, and no number in the file is used.
        notebook = json.loads(text, object_pairs_hook=table, parse_int=float)
    except RecursionError:
        raise Refused("the file is nested too deep to be a notebook") from None
    except ValueError as error:
        raise Refused(_why_not_json(text, error)) from None
    if not isinstance(notebook, dict):
        raise Refused(f"the file is not a notebook, but other JSON; {AGAIN}")
    if doubled:
        notes.append("the file names something twice where it may stand once: the last one was used, as Jupyter does")
    return notebook


def _why_not_json(text: str, error: ValueError) -> str:
    start = text.lstrip()[:200].lower()
    conflict = re.search(r"^(<{7}|={7}|>{7})( |$)", text, re.MULTILINE)
    if conflict:
        line = text.count("\n", 0, conflict.start()) + 1
        return f"the file holds both sides of a merge conflict (line {line}): resolve it, and hand in the result"
    if start.startswith("<"):
        return "the file is not a notebook but a web page (an export as HTML?): hand in the .ipynb file"
    if not start.startswith("{"):
        return f"the file is not a notebook: it is not JSON; {AGAIN}"
    if isinstance(error, json.JSONDecodeError):
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            return "the file is not a notebook: it ends in the middle, as after a copy that broke off"
        return f"the file is not a notebook: it is not JSON (line {error.lineno}: {error.msg}); {AGAIN}"
    return f"the file is not a notebook: it is not JSON; {AGAIN}"


def _cells_of_worksheets(worksheets: list[Any]) -> list[Any] | None:
    """The cells of nbformat 3, which lie in worksheets, with code in `input` and headings as cells of their own."""
    lists = [sheet.get("cells") for sheet in worksheets if isinstance(sheet, dict)]
    if not lists or not all(isinstance(cells, list) for cells in lists):
        return None
    cells: list[Any] = []
    for cell in (cell for cells in lists for cell in cells or []):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            cell = cell | {"source": cell.get("input", "")}
        elif isinstance(cell, dict) and cell.get("cell_type") == "heading":
            cell = cell | {"cell_type": "markdown"}
        cells.append(cell)
    return cells


def _cell(cell: Any, number: int) -> FileCell:
    source = cell.get("source") if isinstance(cell, dict) else 0
    if source is None:  # a cell that was never edited
        source = ""
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise Refused(f"cell {number} of the notebook has no readable source; {AGAIN}")
    if len(source) > MAX_SOURCE:
        raise Refused(f"cell {number} has {len(source)} characters; at most {MAX_SOURCE} are read")
    metadata = cell.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    nbgrader = metadata.get("nbgrader")
    cell_id = next((i for i in (cell.get("id"), metadata.get("id")) if isinstance(i, str)), None)
    nbgrader = nbgrader if isinstance(nbgrader, dict) else {}
    cell_type = cell.get("cell_type")
    cell_type = plain_text(cell_type[:20]) if isinstance(cell_type, str) else "unknown"
    return FileCell(cell_type, cell_id, nbgrader, plain_text(source))


def plain_text(text: str) -> str:
    """The text as any file can hold it: no lone surrogate, no null byte, lines that end in a line feed alone."""
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\0", "�")
    return text.replace("\r\n", "\n").replace("\r", "\n")
