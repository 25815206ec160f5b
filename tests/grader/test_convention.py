"""Conventions of a lab: what a file may say, what is drawn, and that a replacement fits exactly or is refused."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.labs.convention import (
    Convention,
    Option,
    Replacement,
    applied,
    draw,
    load_conventions,
    private_lab,
    validate,
)
from grader.labs.lab import LabError

SOURCE = """# %% [markdown] nbgrader={"grade_id": "text"}
# **Build** `order(items)`: the items, smallest first.

# %% nbgrader={"grade_id": "order", "solution": true}
def order(items):
    ### BEGIN SOLUTION
    return sorted(items)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_order", "grade": true, "points": 1}
# property: the items are in order, smallest first.
# hint: sorted.
seen = order([2, 1, 3])
assert seen == [1, 2, 3], f"expected [1, 2, 3], saw {seen}"
"""
OPTION = """
  - name: {name}
    says: the items are {says}.
    fails: [check_order]
    cells:
      text:
        - old: smallest first.
          new: {says}.
      order:
        - old: sorted(items)
          new: {code}
      check_order:
        - old: in order, smallest first.
          new: "{says}."
        - old: assert seen == [1, 2, 3]
          new: assert seen == {expected}
        - old: expected [1, 2, 3]
          new: expected {expected}
"""
FORMS = [
    ("largest_first", "largest first", "sorted(items)[::-1]", "[3, 2, 1]"),
    ("as_they_came", "as they came", "list(items)", "[2, 1, 3]"),
    ("turned_round", "turned round", "list(items)[::-1]", "[3, 1, 2]"),
]
GOOD = "about: the order\noptions:" + "".join(
    OPTION.format(name=name, says=says, code=code, expected=expected) for name, says, code, expected in FORMS
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "01_order" / "order.py"
    (path.parent / "conventions").mkdir(parents=True)
    path.write_text(SOURCE)
    (path.parent / "conventions" / "order.yaml").write_text(GOOD)
    return path


def change(source: Path, old: str, new: str) -> None:
    path = source.parent / "conventions" / "order.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_option_changes_text_test_and_reference_together(source: Path) -> None:
    (convention,) = validate(source)
    assert convention.name == "order"
    for option, (_, says, code, expected) in zip(convention.options, FORMS, strict=True):
        lab = private_lab(source, (option,))
        texts = {cell.grade_id: cell.source for cell in lab.cells}
        assert says in texts["text"]
        assert f"return {code}\n" in texts["order"]
        assert f"assert seen == {expected}" in texts["check_order"]
        namespace: dict[str, object] = {}
        exec(texts["order"], namespace)
        exec(texts["check_order"], namespace)
        exec(SOURCE[SOURCE.index("def order") : SOURCE.index("# %% nbgrader={" + '"grade_id": "check')], namespace)
        with pytest.raises(AssertionError, match="expected"):
            exec(texts["check_order"], namespace)


def test_a_lab_without_conventions_is_the_public_one(source: Path) -> None:
    (source.parent / "conventions" / "order.yaml").unlink()
    assert load_conventions(source) == []
    assert draw([], b"secret") == []


MISTAKES = [
    ("about: the order\n", "", "about"),
    ("about: the order\n", "about: the order\nname: other\n", "name"),
    ("about: the order\n", "about: the order\ncolor: red\n", "color"),
    ("name: as_they_came", "name: largest_first", "two options"),
    ("name: as_they_came", "name: As They Came", "name"),
    ("fails: [check_order]", "fails: []", "fails"),
    ("fails: [check_order]", "fails: [check_other]", "no check"),
    ("      text:\n", "      other:\n", "no cell other"),
    ("old: sorted(items)\n", "old: sorted(stuff)\n", "found it 0 times"),
    ("old: assert seen == [1, 2, 3]\n", 'old: "[1, 2, 3]"\n', "found it 2 times"),
    ("old: expected [1, 2, 3]\n", 'old: "[1, 2, 3], f"\n', "same place"),
    ("new: sorted(items)[::-1]", "new: sorted(items", "never closed"),
    ("about", "- about", "check_order|mapping|expected"),
    ("options:", "options: [", "while parsing|expected"),
]


@pytest.mark.parametrize(("old", "new", "word"), MISTAKES)
def test_an_authors_mistake_is_named(source: Path, old: str, new: str, word: str) -> None:
    change(source, old, new)
    with pytest.raises(LabError, match=word):
        validate(source)


def test_fewer_than_three_options_are_refused(source: Path) -> None:
    path = source.parent / "conventions" / "order.yaml"
    path.write_text(GOOD[: GOOD.index("  - name: turned_round")])
    with pytest.raises(LabError, match="at least 3"):
        validate(source)


@pytest.mark.parametrize("kind", ["text", "order", "check_order"])
def test_an_option_that_leaves_text_or_test_or_reference_as_it_was_is_refused(source: Path, kind: str) -> None:
    path = source.parent / "conventions" / "order.yaml"
    first = GOOD.index("  - name: as_they_came")
    option = GOOD[:first]
    start = option.index(f"      {kind}:\n")
    rest = option[start + 1 :]
    following = next(
        (i for i in range(len(rest)) if rest[i:].startswith("\n      ") and rest[i + 7] not in " -"), len(rest)
    )
    path.write_text(option[:start] + rest[following + 1 :] + GOOD[first:])
    with pytest.raises(LabError, match="changes no|stays as it is"):
        validate(source)


def conventions(*sizes: int) -> list[Convention]:
    def option(name: str) -> Option:
        return Option(name=name, says="x", fails=["c"], cells={"c": [Replacement(old="a", new="b")]})

    return [
        Convention(name=f"c{number}", about="x", options=[option(f"o{i}") for i in range(size)])
        for number, size in enumerate(sizes)
    ]


@given(st.binary(min_size=32, max_size=32), st.integers(3, 8))
def test_the_same_secret_draws_the_same_and_a_new_option_moves_a_draw_only_to_itself(secret: bytes, size: int) -> None:
    (before,), (after,) = draw(conventions(size), secret), draw(conventions(size + 1), secret)
    assert [before] == draw(conventions(size), secret)
    assert after.name in (before.name, f"o{size}")


def test_every_option_is_drawn_by_some_secret_and_conventions_are_drawn_independently() -> None:
    seen = {tuple(o.name for o in draw(conventions(3, 4), bytes([i]) * 32)) for i in range(200)}
    assert len(seen) == 12


@given(st.text("ab(\n", max_size=30), st.text("ab(", min_size=1, max_size=4), st.text(max_size=5))
def test_a_replacement_is_exact_or_refused(text: str, old: str, new: str) -> None:
    option = Option(name="o", says="x", fails=["c"], cells={"c": [Replacement(old=old, new=new)]})
    if text.count(old) == 1:
        assert applied({"c": text, "d": text}, [option]) == {"c": text.replace(old, new), "d": text}
    else:
        with pytest.raises(LabError, match=f"found it {text.count(old)} times"):
            applied({"c": text}, [option])


def test_replacements_of_two_options_are_looked_up_in_the_text_as_it_was() -> None:
    def option(name: str, old: str, new: str) -> Option:
        return Option(name=name, says="x", fails=["c"], cells={"c": [Replacement(old=old, new=new)]})

    both = [option("one", "a", "b"), option("two", "b", "a")]
    assert applied({"c": "a b"}, both) == applied({"c": "a b"}, both[::-1]) == {"c": "b a"}
    with pytest.raises(LabError, match="same place"):
        applied({"c": "a b"}, [option("one", "a b", "x"), option("two", "b", "y")])


def test_indentation_of_a_multi_line_replacement_is_kept() -> None:
    new = textwrap.dedent("""\
        x = 1
            y = 2""")
    option = Option(name="o", says="x", fails=["c"], cells={"c": [Replacement(old="pass", new=new)]})
    assert applied({"c": "def f():\n    pass\n"}, [option]) == {"c": "def f():\n    x = 1\n    y = 2\n"}
