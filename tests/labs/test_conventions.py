"""The conventions of every lab: all draws make a lab, and each option costs a copied public solution its points."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path

import jupytext
import pytest

from grader.cell_form import without_tool_comments
from grader.labs.convention import (
    PUBLIC_SHARE,
    Convention,
    applied,
    combinations,
    private_lab,
    public_points,
    validate,
)
from grader.labs.lab import lab_from_notebook
from grader.labs.lab_source import private_notebook, solution_notebook
from grader.labs.percent_file import percent_cells
from grader.proofs.convention_proof import WRONG_VALUES, covering, wrong_value_cases, wrong_values
from tests.labs.proving import folder, prove
from tests.labs.turns import SOURCES, draw_of, due
from tests.warm import Warm

EACH_LAB = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)


read_once = functools.cache(jupytext.reads)


@pytest.fixture(autouse=True)
def _each_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lab's source is read again for each draw, and reading takes most of the time that making a lab of it does."""
    monkeypatch.setattr(jupytext, "reads", lambda text, fmt: copy.deepcopy(read_once(text, fmt=fmt)))


@functools.cache
def validated(source: Path) -> list[Convention]:
    return validate(source)


@EACH_LAB
def test_a_lab_has_two_independent_conventions_and_all_draws_make_a_lab(source: Path) -> None:
    conventions = validated(source)  # applies every draw
    assert len(conventions) >= 2
    assert len(list(combinations(conventions))) >= 9


@EACH_LAB
def test_a_copied_public_solution_earns_little_in_every_draw(source: Path) -> None:
    """That it loses the checks which the options name is proven in full (in_full/)."""
    public = private_lab(source, ())
    _, most = public_points(public, validated(source))
    assert most <= PUBLIC_SHARE * public.points


@EACH_LAB
def test_without_an_option_the_lab_is_the_public_one(source: Path) -> None:
    assert private_notebook(source, ()) == solution_notebook(source)


@EACH_LAB
def test_what_is_proven_is_what_the_notebook_has(source: Path) -> None:
    """But for texts, the cell that fetches the course, and comments to formatter and linter."""
    shipped = lab_from_notebook(solution_notebook(source), source.parent.name, source.stem)
    given = [cell for cell in shipped.cells if cell.kind != "text" and cell.grade_id != "bootstrap"]
    proven = [cell for cell in private_lab(source, ()).cells if cell.kind != "text"]
    assert [replace(cell, source=without_tool_comments(cell.source)) for cell in proven] == given


@EACH_LAB
def test_every_check_that_a_public_solution_loses_tells_another_property_or_hint(source: Path) -> None:
    public = private_lab(source, ())
    for convention in validated(source):
        for option in convention.options:
            private = private_lab(source, (option,))
            for check in option.fails:
                texts = [
                    [lab.cell(check).property_text, lab.cell(check).hint]  # type: ignore[union-attr]
                    for lab in (public, private)
                ]
                assert texts[0] != texts[1], f"{convention.name}, {option.name}: {check} says what it said before"


@EACH_LAB
def test_options_cover_and_replacements_are_exact(source: Path) -> None:
    conventions = validated(source)
    drawn = {option.name for options in covering(conventions) for option in options}
    assert drawn == {option.name for convention in conventions for option in convention.options}
    texts = {cell["metadata"]["nbgrader"]["grade_id"]: cell["source"] for cell in percent_cells(source)}
    for options in covering(conventions):
        changed = applied(texts, options)
        assert changed == applied(texts, options[::-1])
        untouched = set(texts) - {grade_id for option in options for grade_id in option.cells}
        assert all(changed[grade_id] == texts[grade_id] for grade_id in untouched)


@pytest.mark.timeout(9000)
@pytest.mark.parametrize("source", due(), ids=lambda path: path.parent.name)
def test_with_drawn_options_the_reference_passes_and_a_public_solution_loses_their_checks(
    source: Path, warm: Warm
) -> None:
    """In one of as few draws as hold every option, directly."""
    prove(warm, "convention_proof", source, "--sample", draw_of(source))


@EACH_LAB
def test_every_option_has_a_mutant_that_has_its_form_and_another_value(source: Path) -> None:
    """A check that reads an option's answer and looks at its form alone pays for any number in it."""
    found = wrong_values(folder(source))
    options = {(each.name, option.name): option for each in validated(source) for option in each.options}
    assert found.keys() == options.keys(), f"{WRONG_VALUES} has a list of mutants for each option, and no other"
    for key, mutants in found.items():
        assert mutants, f"{key}: no mutant"
        assert len(wrong_value_cases(source, options[key], mutants)) == len(mutants)  # each fits the private reference
        for mutant in mutants:
            # The engine runs the learner's functions together: there another form may be right, and no wrong value.
            others = {check for check in mutant.fails if not check.startswith("check_engine")}
            assert others <= set(options[key].fails), mutant.fault
            assert not set(options[key].fails).isdisjoint(mutant.fails), mutant.fault


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("source", due(), ids=lambda path: path.parent.name)
def test_a_wrong_value_of_a_drawn_option_fails_its_checks(source: Path, warm: Warm) -> None:
    prove(warm, "convention_proof", source, str(folder(source)), "--values", "--sample", draw_of(source))
