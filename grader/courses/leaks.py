"""Looks for what students must not get in what they are about to get: solutions, hidden tests, secrets, stray data.

What is hidden comes from the solution notebook, line by line. A line that is also in the visible part is no
secret. Lines are compared without white space, quotes and backslashes, so that another indentation, a JSON string or a
line of a traceback hide nothing; base64, hexadecimal, zlib and gzip are looked into.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from grader.labs.lab import HELPS, STUB, Cell, Lab, split_hidden

BEGIN_SOLUTION, END_SOLUTION = "### BEGIN SOLUTION", "### END SOLUTION"
MARKERS = ("BEGIN SOLUTION", "END SOLUTION", "BEGIN HIDDEN TESTS", "END HIDDEN TESTS")
LONG = 16  # characters without white space: from here on a line is looked for anywhere, below it only as a whole line
SHORT = 4  # shorter ones, such as `)`, say nothing
MAX_DEPTH, MAX_UNPACKED = 3, 4 << 20  # of what is encoded within what is encoded; bytes

NOTEBOOK_KEYS = {"cells": None, "metadata": {"kernelspec": {"display_name", "language", "name"},
                 "language_info": {"name"}}, "nbformat": None, "nbformat_minor": None}  # fmt: skip
CELL_KEYS = {"cell_type", "execution_count", "id", "metadata", "outputs", "source"}
CELL_METADATA = {
    "cellView": None,
    "deletable": None,
    "editable": None,
    "inferlab": {"where", *HELPS},
    "jupyter": {"source_hidden"},
    "nbgrader": {"cell_type", "checksum", "grade", "grade_id", "locked", "points", "schema_version", "solution",
                 "task"},
}  # fmt: skip


@dataclass(frozen=True)
class Leak:
    """Something that students must not get. place: file and cell. what: what was found there, without repeating it."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


@dataclass
class Hidden:
    """What must not leave, by name. anywhere: squeezed texts; lines: squeezed whole lines; raw: exact bytes."""

    anywhere: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    raw: dict[bytes, str] = field(default_factory=dict)

    def add_lab(self, lab: Lab) -> None:
        """Adds all lines of a lab's solutions and hidden tests that are not visible elsewhere in that lab."""
        parts = [(cell, *visible_and_hidden(cell)) for cell in lab.cells]
        seen = "\n".join([STUB, *(visible for _, visible, _ in parts)])
        everything, visible_lines = squeezed(seen), {squeezed(line) for line in seen.split("\n")}
        for cell, _, hidden in parts:
            what = f"a line of the {'hidden tests' if cell.kind == 'check' else 'solution'} of {cell.grade_id}"
            for line in hidden.split("\n"):
                for text in {squeezed(line), squeezed(line.split("  #")[0])}:
                    if len(text) >= LONG and text not in everything:
                        self.anywhere.setdefault(text, what)
                    elif SHORT <= len(text) < LONG and text not in visible_lines:
                        self.lines.setdefault(text, what)

    def add_other_lab(self, lab: Lab) -> None:
        """Adds a lab's solutions and hidden tests as wholes: another lab may share lines with it, and not its cells."""
        for cell in lab.cells:
            if len(text := squeezed(visible_and_hidden(cell)[1])) >= 4 * LONG:
                self.anywhere.setdefault(text, f"the hidden part of {cell.grade_id} of lab {lab.slug}")

    def add_secret(self, secret: bytes, name: str) -> None:
        """Adds secret bytes, as such and in hexadecimal. Base64 is unpacked before anything is compared."""
        for form in (secret, secret.hex().encode(), secret.hex().upper().encode()):
            self.raw[form] = name


def visible_and_hidden(cell: Cell) -> tuple[str, str]:
    """What a student gets of a cell of the solution notebook, and what not."""
    if cell.kind == "check":
        return split_hidden(cell.source)
    if cell.kind not in ("solution", "answer"):
        return cell.source, ""
    visible: list[str] = []
    hidden: list[str] = []
    inside = False
    for line in cell.source.split("\n"):
        if BEGIN_SOLUTION in line or END_SOLUTION in line:
            inside = BEGIN_SOLUTION in line
        else:
            (hidden if inside else visible).append(line)
    return "\n".join(visible), "\n".join(hidden)


def squeezed(text: str) -> str:
    """A text without white space, quotes, backslashes and NULs."""
    return re.sub(r"[\s\"'`\\\x00]+", "", text)


def notebook_leaks(text: str, place: str, hidden: Hidden) -> list[Leak]:
    """What is wrong with the text of a notebook that students are to get."""
    try:
        notebook = json.loads(text)
        cells = notebook["cells"]
        if not isinstance(cells, list) or not all(isinstance(cell["metadata"], dict) for cell in cells):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return [Leak(place, f"is no notebook ({type(error).__name__})")]
    found = [*_unknown_keys(notebook, NOTEBOOK_KEYS, place)]
    for number, cell in enumerate(cells):
        metadata = cell["metadata"]
        own = metadata.get("nbgrader")
        where = f"{place}, cell {own.get('grade_id', number) if isinstance(own, dict) else number}"
        found += [Leak(where, f"has {key}") for key in sorted(set(cell) - CELL_KEYS)]
        found += _unknown_keys(metadata, CELL_METADATA, where)
        if cell.get("outputs"):
            found.append(Leak(where, "has outputs"))
        if cell.get("execution_count") is not None:
            found.append(Leak(where, "was executed"))
        for inner, value in texts_in(cell, where):
            found += text_leaks(value, inner, hidden, as_lines=True)
    for key, value in notebook.items():
        if key != "cells":
            found += [leak for inner, t in texts_in(value, f"{place}, {key}") for leak in text_leaks(t, inner, hidden)]
    # And the file as it is: keys that stand twice, of which JSON keeps the last, and whatever else is not in a value.
    known = {leak.what for leak in found}
    return found + [leak for leak in text_leaks(text, place, hidden) if leak.what not in known]


def _unknown_keys(value: Any, known: dict[str, Any], place: str) -> Iterator[Leak]:
    """Keys that the release does not write, two levels deep."""
    if not isinstance(value, dict):
        yield Leak(place, "has metadata that are no object")
        return
    for key in sorted(set(value) - set(known)):
        yield Leak(place, f"has the unknown metadata {key}")
    for key, inner in known.items():
        if inner is not None and key in value:
            below = inner if isinstance(inner, dict) else dict.fromkeys(inner)
            yield from _unknown_keys(value[key], below, f"{place}, {key}")


def texts_in(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """(place, text) of every text in a JSON value; keys count, and a list of texts is one text."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield place, key
            yield from texts_in(inner, f"{place}, {key}")
    elif isinstance(value, list):
        if value and all(isinstance(inner, str) for inner in value):
            yield place, "".join(value)
        else:
            for inner in value:
                yield from texts_in(inner, place)


def text_leaks(text: str, place: str, hidden: Hidden, as_lines: bool = False) -> list[Leak]:
    """What of `hidden` stands in a text, also encoded; as_lines: short lines count too, if they are lines of it."""
    found: dict[str, None] = {}
    for depth, form in _forms(text.encode("utf-8", "surrogatepass")):
        suffix = " (encoded)" if depth else ""
        readable = form.decode("utf-8", "ignore")
        compact = squeezed(readable)
        found |= {f"{what}{suffix}": None for needle, what in hidden.raw.items() if needle in form}
        found |= {f"{what}{suffix}": None for needle, what in hidden.anywhere.items() if needle in compact}
        found |= {f"{m}{suffix}": None for m in MARKERS if squeezed(m) in compact}
        if as_lines or depth:
            lines = {squeezed(line) for line in re.split(r"\n|\\n", readable)}
            found |= {f"{hidden.lines[line]}{suffix}": None for line in lines & hidden.lines.keys()}
    return [Leak(place, what) for what in found]


def _forms(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(depth, content) of the content itself and of what is encoded in it."""
    waiting, seen = [(0, content)], {content}
    while waiting:
        depth, form = waiting.pop()
        yield depth, form
        if depth < MAX_DEPTH:
            new = {inner for inner in _unpacked(form) if inner and inner not in seen}
            seen |= new
            waiting += [(depth + 1, inner) for inner in new]


def _unpacked(content: bytes) -> Iterator[bytes]:
    yield _unzipped(content)
    text = content.decode("utf-8", "ignore")
    # Once as it stands, once without line breaks: a long encoded text may be broken into lines.
    for version in {text, squeezed(text)}:
        for run in re.findall(r"[A-Za-z0-9+/_-]{20,}", version):
            # What comes before may be of the same alphabet, so the first group of four may begin anywhere.
            yield from (_decoded_base64(run[start:]) for start in range(4))
        yield from (bytes.fromhex(run[: len(run) // 2 * 2]) for run in re.findall(r"[0-9A-Fa-f]{32,}", version))


def _decoded_base64(run: str) -> bytes:
    run = run.replace("-", "+").replace("_", "/")[: len(run) - (len(run) % 4 == 1)]
    return base64.b64decode(run + "=" * (-len(run) % 4))


def _unzipped(content: bytes) -> bytes:
    """The content of zlib or gzip, at most MAX_UNPACKED bytes; empty where it is neither."""
    try:
        return zlib.decompressobj(wbits=47).decompress(content, MAX_UNPACKED)  # 47: whichever header there is
    except zlib.error:
        return b""
