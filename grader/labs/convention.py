"""What a private course changes in a lab: one option of each of its conventions, in text, tests and reference alike.

A convention is an arbitrary choice: the order of a result, which of equal tokens wins. The options that a
course can draw stand beside the lab's source, in `solutions/NN_slug/conventions/NAME.yaml`, as exact replacements per
cell; the source itself is the public lab and stays an ordinary file. The format is described in `grader/README.md`.
"""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grader.labs.lab import Lab, LabError
from grader.labs.percent_file import percent_cells, percent_lab

FOLDER = "conventions"
MIN_OPTIONS = 3  # besides the public one
PUBLIC_SHARE = 0.3  # of a lab's points, that a copied public solution may earn in a private course

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Text = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Replacement(Strict):
    """`old` stands exactly once in the cell and becomes `new`."""

    old: Text
    new: str


class Option(Strict):
    """One way a convention can be. says: the convention in a sentence. fails: the checks a public solution loses."""

    name: Name
    says: Text
    fails: Annotated[list[Text], Field(min_length=1)]
    cells: Annotated[dict[str, Annotated[list[Replacement], Field(min_length=1)]], Field(min_length=1)]


class Convention(Strict):
    """A convention of a lab. about: what is agreed on. Options do not hold the public form, which is the source
    itself."""

    name: Name  # of the file
    about: Text
    options: Annotated[list[Option], Field(min_length=MIN_OPTIONS)]


def load_conventions(source: Path) -> list[Convention]:
    """The conventions beside a lab's source; an empty list where it has none. Raises LabError, OSError."""
    found = []
    for path in sorted(source.with_name(FOLDER).glob("*.yaml")):
        try:
            content = yaml.safe_load(path.read_text("utf-8"))
            if not isinstance(content, dict) or "name" in content:
                raise LabError(f"{path}: expected the keys about and options; its name is that of the file")
            convention = Convention.model_validate(content | {"name": path.stem})
        except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
            raise LabError(f"{path}: {error}") from None
        names = [option.name for option in convention.options]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise LabError(f"{path}: two options are called {twice[0]}")
        found.append(convention)
    return found


def draw(conventions: Iterable[Convention], secret: bytes) -> list[Option]:
    """One option of each convention, as `secret` says. A new option elsewhere changes few of the older draws."""

    drawn = []
    for convention in conventions:
        weights = {
            hmac.digest(secret, f"convention/{convention.name}/{option.name}".encode(), "sha256"): option
            for option in convention.options
        }
        drawn.append(weights[max(weights)])
    return drawn


def combinations(conventions: Sequence[Convention]) -> Iterator[tuple[Option, ...]]:
    """All options that a course could draw."""
    return itertools.product(*(c.options for c in conventions))


def public_points(lab: Lab, conventions: Sequence[Convention]) -> tuple[float, float]:
    """The least and the most points that a copied public solution earns, over all that a course could draw."""
    points = {cell.grade_id: cell.points for cell in lab.of_kind("check")}
    earned = [
        lab.points - sum(points[check] for check in {check for option in drawn for check in option.fails})
        for drawn in combinations(conventions)
    ]
    return min(earned), max(earned)


def private_lab(source: Path, options: Sequence[Option]) -> Lab:
    """A lab with these options and its hidden tests; without any it is the public one. Raises LabError."""
    return percent_lab(source, changed_cells(source, options))


def changed_cells(source: Path, options: Sequence[Option]) -> list[dict[str, Any]]:
    """The cells of a lab's percent file with these options. Raises LabError."""
    cells = percent_cells(source)
    texts = {cell["metadata"]["nbgrader"]["grade_id"]: cell["source"] for cell in cells}
    changed = applied(texts, options)
    for cell in cells:
        cell["source"] = changed[cell["metadata"]["nbgrader"]["grade_id"]]
    return cells


def applied_where_touched(grade_id: str, text: str, options: Iterable[Option]) -> str:
    """The text of one cell with what these options replace in it. Raises LabError where one does not fit."""
    here = [o.model_copy(update={"cells": {grade_id: o.cells[grade_id]}}) for o in options if grade_id in o.cells]
    return applied({grade_id: text}, here)[grade_id]


def applied(texts: Mapping[str, str], options: Iterable[Option]) -> dict[str, str]:
    """Texts of cells, by grade_id, with the options' replacements. Raises LabError where one does not fit.

    Every `old` is looked up in the text as it was, so the order of options does not matter, and two options that
    change the same place are an error.
    """
    spans: dict[str, list[tuple[int, int, str, str]]] = {}
    for option in options:
        for grade_id, replacements in option.cells.items():
            if grade_id not in texts:
                raise LabError(f"convention option {option.name}: no cell {grade_id} in this lab")
            for replacement in replacements:
                start = _the_one_place(texts[grade_id], replacement.old, f"{option.name}, cell {grade_id}")
                end = start + len(replacement.old)
                spans.setdefault(grade_id, []).append((start, end, replacement.new, option.name))
    result = dict(texts)
    for grade_id, found in spans.items():
        pieces, position, before = [], 0, ""
        for start, end, new, name in sorted(found):
            if start < position:
                raise LabError(f"convention options {before} and {name} change the same place of cell {grade_id}")
            pieces += [texts[grade_id][position:start], new]
            position, before = end, name
        result[grade_id] = "".join(pieces) + texts[grade_id][position:]
    return result


def _the_one_place(text: str, old: str, where: str) -> int:
    if (count := text.count(old)) != 1:
        raise LabError(f"convention option {where}: expected this text once, found it {count} times: {old!r}")
    return text.index(old)


def validate(source: Path) -> list[Convention]:
    """The conventions of a lab, after applying all that a course could draw. Raises LabError, which names the place."""
    conventions = load_conventions(source)
    public = private_lab(source, ())
    checks = {cell.grade_id for cell in public.of_kind("check")}
    for option in (option for convention in conventions for option in convention.options):
        where = f"{public.slug}, convention option {option.name}"
        if unknown := set(option.fails) - checks:
            raise LabError(f"{where}: fails {', '.join(sorted(unknown))}, which is no check")
        private = private_lab(source, (option,))
        kinds = {cell.kind for cell in public.cells if cell.grade_id in option.cells}
        if missing := {"text", "solution", "check"} - kinds:
            raise LabError(f"{where}: changes no {' and no '.join(sorted(missing))} cell")
        silent = [c for c in option.fails if private.cell(c) == public.cell(c)]
        if silent:
            raise LabError(f"{where}: {', '.join(silent)} stays as it is and cannot tell what is expected now")
        if private.graded_names != public.graded_names:
            raise LabError(f"{where}: the graded names must stay as they are")
    texts = {cell["metadata"]["nbgrader"]["grade_id"]: cell["source"] for cell in percent_cells(source)}
    for options in combinations(conventions):
        applied(texts, options)  # a notebook of each of some hundred draws would take minutes
    return conventions
