"""CSV files as spreadsheets and learning management systems write them: their encodings, and what parts their cells."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Container, Iterator
from pathlib import Path

from grader.course import CourseError


def csv_rows(path: Path, known: Container[str], notes: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, the header first, each with the number of its last line.

    known: names that columns may have, as `column_name` gives them. notes: is told of an encoding that was guessed.
    Raises CourseError, OSError.
    """
    text = _text(path, notes).lstrip("\r\n")
    text = re.sub(r"\Asep=.?(\r\n|\r|\n)", "", text)  # a line for Excel
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text, known), strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise CourseError(f"{path.name}, line {reader.line_num}: not CSV: {error}") from None


def column_name(cell: str) -> str:
    """A header's cell, without what people write differently."""
    return re.sub(r"\s+", " ", cell.strip().lower())


def _delimiter(text: str, known: Container[str]) -> str:
    """What parts the header into the most columns that are known: a comma may also stand in a column's name."""

    def parted(delimiter: str) -> tuple[int, int]:
        try:
            names = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
        except csv.Error:
            return 0, 0
        return sum(column_name(name) in known for name in names), len(names)

    return max(",;\t", key=parted)


def _text(path: Path, notes: list[str]) -> str:
    raw = path.read_bytes()
    for bom, encoding in ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):
        if raw.startswith(bom):
            return raw.decode(encoding, "replace")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        notes.append("the file is not UTF-8: it was read as Windows-1252; check the names")
        return raw.decode("cp1252", "replace")
