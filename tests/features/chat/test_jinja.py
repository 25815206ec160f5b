"""What Jinja can do it does here as it does in `transformers`: statements, filters, tests, operators."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from transformers.utils.chat_template_utils import render_jinja_template

from reference_impl.features.chat.sandbox import ChatTemplateError, render

VALUES = {
    "s": "a <b> & 'c' Dé\n  e\tf", "n": 7, "x": 2.75, "l": [3, 1, 2, 1], "w": ["b", "A", "a<"], "e": [], "none": None,
    "d": {"b": 1, "a": {"c": "<"}}, "m": [{"r": "u", "v": 2}, {"r": "a", "v": 1}, {"r": "u", "v": 1}], "t": True,
    "k": {"<": "é"},
}  # fmt: skip

# One a line; \n is a line's end.
STATEMENTS = [
    line.replace("\\n", "\n") for line in (Path(__file__).parent / "statements.txt").read_text("utf-8").splitlines()
]
GENERATORS = ("batch", "items", "map", "reject", "rejectattr", "select", "selectattr", "slice", "unique")


def theirs(template: str) -> str | None:
    try:
        [text], _ = render_jinja_template([[]], chat_template=template, **VALUES)
    except Exception:
        return None
    return text


def ours(template: str) -> str | None:
    given = {**copy.deepcopy(VALUES), "messages": [], "tools": None, "documents": None}
    before = copy.deepcopy(given)
    try:
        text = render(template, given, "T")
    except ChatTemplateError:
        return None
    assert given == before
    return text


def same(template: str) -> bool:
    """Whether both give it a text; the texts are equal."""
    expected, found = (text and re.sub("0x[0-9a-f]+", "0x", text) for text in (theirs(template), ours(template)))
    assert found == expected
    return expected is not None


@pytest.mark.parametrize("template", STATEMENTS)
def test_statements_and_expressions(template: str) -> None:
    same(template)


def pairs(arguments: Sequence[str], every: bool) -> list[tuple[str, str]]:
    """Values and arguments: all with all; or all with the first argument, and each other with a third of the values."""
    return [
        (value, argument)
        for i, value in enumerate(VALUES)
        for j, argument in enumerate(arguments)
        if every or not j or (i + j) % 3 == 0
    ]


EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


@EVERY
@pytest.mark.parametrize("name", sorted(set(DEFAULT_FILTERS) - {"random"}))
def test_filters(name: str, every: bool) -> None:
    arguments = ["", "(2)", "('a')", "(3, 'x')", "('a', 'b')", "(attribute='v')", "(1, true)"]
    also = "|list" if name in GENERATORS else ""
    given = [f"{{{{ {value}|{name}{a}{also} }}}}" for value, a in pairs(arguments, every)]
    assert sum(map(same, given))


@EVERY
@pytest.mark.parametrize("name", sorted(set(DEFAULT_TESTS) - {"filter", "test"}))
def test_tests(name: str, every: bool) -> None:
    given = [f"{{{{ {value} is {name}{a} }}}}" for value, a in pairs(["", "(2)", "(l)", "(s)", " 'a'"], every)]
    selected = pairs(["", ", 1", ", 'a', 'b'"], every)
    given += [f"{{{{ {value}|select('{name}'{a})|list }}}}" for value, a in selected]
    assert sum(map(same, given))
