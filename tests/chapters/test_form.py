"""The form of chapters and labs (CONTRIBUTING.md): what is folded, how long a cell is, when a prediction is answered.

`form_exceptions.yaml` lists what does not keep to it yet. What is not listed there fails, and so does a line there that
is no longer needed: `python -m tests.chapters.test_form` takes these out and adds none.
"""

import ast
import functools
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from grader.cell_form import FOLDED, LONGEST, num_lines, without_tool_comments
from grader.chapter_source import chapter_sources
from grader.labs.lab import load_lab
from tests.chapters.prose import read_notebook

ROOT = Path(__file__).parents[2]
EXCEPTIONS = Path(__file__).with_name("form_exceptions.yaml")
CHAPTERS = chapter_sources(ROOT)
LABS = sorted((ROOT / "labs").glob("[0-9]*_*/*.ipynb"))
SOLUTIONS = sorted((ROOT / "solutions").glob("[0-9]*_*/*.ipynb"))
WITHIN = 2  # code cells that a reader sees, from a prediction to its answer

every_chapter = pytest.mark.parametrize("source", CHAPTERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
SHOWN_AS_LAST = ("show", "table", "widgets.predict", "widgets.show", "widgets.table")
every_lab = pytest.mark.parametrize("path", LABS, ids=lambda path: path.parent.name)


def exceptions(rule: str) -> dict[str, int]:
    return (yaml.safe_load(EXCEPTIONS.read_text("utf-8")) or {}).get(rule) or {}


def folded(cell: dict[str, Any]) -> bool:
    return bool(cell["metadata"].get("jupyter", {}).get("source_hidden"))


@functools.cache
def code_cells(source: Path) -> list[dict[str, Any]]:
    """Of the notebook, which equals its source (test_notebooks.py) and is read sooner."""
    cells = read_notebook(source.with_suffix(".ipynb"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


parsed = functools.cache(ast.parse)


def named(source: Path, cell: dict[str, Any]) -> str:
    return f"{source.parent.name}/{source.name}#{cell['id']}"


# ---------------------------------------------------------------- what breaks a rule, and by how much


def long_cells(source: Path) -> dict[str, int]:
    """Cells that a reader sees, with more lines than they may have."""
    shown = [cell for cell in code_cells(source) if not folded(cell)]
    return {named(source, c): n for c in shown if (n := num_lines(c["source"])) > LONGEST}


def calls(source: Path, function: str) -> dict[str, int]:
    """The ids that widgets.`function` is called with, and at which of the code cells that a reader sees."""
    found: dict[str, int] = {}
    seen = 0
    for cell in code_cells(source):
        seen += not folded(cell)
        for node in ast.walk(parsed(cell["source"])):
            if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("widgets.") == function:
                assert node.args, f"{named(source, cell)}: {function}() without an id"
                assert isinstance(node.args[0], ast.Constant), f"{named(source, cell)}: the id is no literal"
                found.setdefault(str(node.args[0].value), seen)
    return found


def late_answers(source: Path) -> dict[str, int]:
    """Predictions that are answered more than WITHIN visible code cells later, and how many."""
    answered = calls(source, "reveal")
    distances = {i: answered[i] - at for i, at in calls(source, "predict").items() if i in answered}
    return {f"{source.parent.name}/{source.name}#{i}": n for i, n in distances.items() if n > WITHIN}


def aligned_prints(source: Path) -> dict[str, int]:
    """Cells that print columns by hand: a print with two or more fields of a width, and how many such prints."""
    found = {}
    for cell in code_cells(source):
        prints = [
            node
            for node in ast.walk(parsed(cell["source"]))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(list(_widths(node))) > 1
        ]
        if prints:
            found[named(source, cell)] = len(prints)
    return found


def _widths(node: ast.AST) -> Iterator[ast.FormattedValue]:
    for value in ast.walk(node):
        if isinstance(value, ast.FormattedValue) and value.format_spec is not None:
            spec = ast.unparse(value.format_spec)[2:-1]  # f'>8.2f'
            if re.match(r"(.?[<>^=])?[ +-]?[1-9]", spec):
                yield value


RULES = {"long_cells": long_cells, "late_answers": late_answers, "aligned_prints": aligned_prints}


# ---------------------------------------------------------------- chapters


@pytest.mark.parametrize("rule", RULES)
@every_chapter
def test_a_chapter_keeps_to_the_form_but_for_what_is_listed(source: Path, rule: str) -> None:
    part = f"{source.parent.name}/{source.name}#"
    listed = {name: n for name, n in exceptions(rule).items() if name.startswith(part)}
    found = RULES[rule](source)
    worse = {name: n for name, n in found.items() if n > listed.get(name, 0)}
    assert worse == {}, f"{rule}: see 'The form of a chapter and a lab' in CONTRIBUTING.md"
    mended = sorted(set(listed) - set(found))
    assert mended == [], f"{rule}: mended, so run: python -m tests.chapters.test_form"


def test_what_is_listed_is_of_a_chapter_that_exists() -> None:
    parts = {f"{source.parent.name}/{source.name}" for source in CHAPTERS}
    listed = {name.split("#")[0] for rule in RULES for name in exceptions(rule)}
    assert listed <= parts, "run: python -m tests.chapters.test_form"


@every_chapter
def test_set_up_is_folded_in_both_front_ends_and_a_mechanism_in_none(source: Path) -> None:
    for cell in code_cells(source):
        if cell["id"] in ("bootstrap", "setup"):
            assert cell["metadata"].items() >= FOLDED.items(), cell["id"]
        if cell["id"].startswith("scratch"):
            assert not folded(cell), f"{cell['id']}: a mechanism is cut in two, not folded"
        assert folded(cell) == ("cellView" in cell["metadata"]), cell["id"]


def test_every_prediction_is_answered_after_it_and_no_two_have_the_same_id() -> None:
    seen: set[str] = set()
    for source in CHAPTERS:
        asked, answered = calls(source, "predict"), calls(source, "reveal")
        assert set(asked) == set(answered), source
        assert all(answered[i] > at for i, at in asked.items()), source
        assert not seen & set(asked), source
        seen |= set(asked)
    assert seen


# ---------------------------------------------------------------- labs


@every_lab
def test_a_given_cell_of_a_lab_is_short_or_folded_and_the_learners_own_is_open(path: Path) -> None:
    lab = load_lab(path)
    for raw, cell in zip(lab.notebook["cells"], lab.cells, strict=True):
        if cell.kind in ("solution", "answer"):
            assert not folded(raw), cell.grade_id
        elif cell.kind in ("code", "check"):
            assert folded(raw) or num_lines(cell.source) <= LONGEST, cell.grade_id
            assert folded(raw) == ("cellView" in raw["metadata"]), cell.grade_id
        if cell.grade_id in ("bootstrap", "imports", "tools"):
            assert folded(raw), cell.grade_id


@every_lab
def test_the_released_lab_and_the_instructors_fold_the_same_cells(path: Path) -> None:
    solution = read_notebook(ROOT / "solutions" / path.parent.name / path.name)
    released = read_notebook(path)
    assert [c["id"] for c in released["cells"] if folded(c)] == [c["id"] for c in solution["cells"] if folded(c)]


# ---------------------------------------------------------------- comments to tools


@pytest.mark.parametrize(
    "path",
    [*(source.with_suffix(".ipynb") for source in CHAPTERS), *LABS, *SOLUTIONS],
    ids=lambda path: f"{path.parent.parent.name}-{path.parent.name}-{path.stem}",
)
def test_no_comment_of_a_notebook_speaks_to_a_formatter_or_a_linter(path: Path) -> None:
    for cell in read_notebook(path)["cells"]:
        if cell["cell_type"] == "code":
            tokens = tokenize.generate_tokens(StringIO("".join(cell["source"])).readline)
            comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
            assert [c for c in comments if re.search(r"fmt:|noqa|ruff:|type: *ignore|pragma", c)] == [], cell["id"]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("x = 1  # fmt: skip", "x = 1"),
        ("x = 1  # the first  # noqa: E501", "x = 1  # the first"),
        ("x = 1  # noqa: E501  # the first", "x = 1  # the first"),
        ("# fmt: off\nx = 1\n# fmt: on", "x = 1"),
        ("x = '''\n# fmt: skip\n'''", "x = '''\n# fmt: skip\n'''"),
        ("x = 'a  # noqa'  # type: ignore[assignment]", "x = 'a  # noqa'"),
        ("def f():\n    # ruff: noqa\n    return 1", "def f():\n    return 1"),
        ("# format: one line each\nx = 1", "# format: one line each\nx = 1"),
    ],
)
def test_comments_to_tools_are_left_out_and_strings_stay(source: str, shown: str) -> None:
    assert without_tool_comments(source) == shown


# ---------------------------------------------------------------- the list shrinks


def main() -> None:
    """Takes from the list what is mended, and lowers what has become less. Adds nothing."""
    head = [line for line in EXCEPTIONS.read_text("utf-8").splitlines() if line.startswith("#")]
    kept: dict[str, dict[str, int]] = {}
    for rule, breaks in RULES.items():
        found = {name: n for source in CHAPTERS for name, n in breaks(source).items()}
        kept[rule] = {name: min(n, found[name]) for name, n in exceptions(rule).items() if name in found}
    EXCEPTIONS.write_text("\n".join(head) + "\n" + yaml.safe_dump(kept, sort_keys=False), "utf-8")


if __name__ == "__main__":
    main()


@every_chapter
def test_what_a_cell_shows_is_shown(source: Path) -> None:
    """A notebook shows the value of a cell's last line alone, and only where that is not inside an if or a loop: what
    stands elsewhere has to be handed to display()."""
    lost = []
    for cell in code_cells(source):
        tree = parsed(cell["source"])
        for node in ast.walk(tree):
            called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func)
            if called in SHOWN_AS_LAST and node is not tree.body[-1]:
                lost.append(f"{named(source, cell)}: {called}")
    assert not lost
