"""From a percent file to the two notebooks: complete, byte-identical, nothing hidden in the release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grader.labs.lab import Lab, LabError, lab_from_notebook
from grader.labs.lab_source import build_labs, differing, released_notebook, solution_notebook, write_notebook
from grader.study.workspace import data_root


def test_building_twice_gives_the_same_bytes(toy_source: Path, solution_text: str, release_text: str) -> None:
    assert write_notebook(solution_notebook(toy_source)) == solution_text
    assert released_notebook(solution_text, "01_toy", "toy") == release_text


def test_cell_ids_are_grade_ids(release_text: str) -> None:
    for cell in json.loads(release_text)["cells"]:
        assert cell["id"] == cell["metadata"]["nbgrader"]["grade_id"]


def test_both_notebooks_are_valid_for_jupyter(solution_text: str, release_text: str) -> None:
    import nbformat

    for text in (solution_text, release_text):
        nbformat.validate(nbformat.reads(text, as_version=4))


def test_the_release_has_stubs_and_no_hidden_test(solution_text: str, release_text: str) -> None:
    for secret in ("x.clone()", "HIDDEN", "reference.", "BEGIN SOLUTION", "torch.randn"):
        assert secret in solution_text
        assert secret not in release_text
    assert release_text.count('raise NotImplementedError(\\"not written yet\\")') == 5


def test_the_bootstrap_is_the_first_code_cell_and_does_nothing_here(release_text: str) -> None:
    first = next(cell for cell in json.loads(release_text)["cells"] if cell["cell_type"] == "code")
    assert first["id"] == "bootstrap"
    exec("".join(first["source"]), {})


def test_graded_names_points_property_and_hint_are_read(lab: Lab) -> None:
    assert lab.graded_names == ["Window", "apply_all"]
    assert lab.points == 6
    check = lab.of_kind("check")[0]
    assert check.property_text == "the mean is over the last `size` vectors only."
    assert check.hint == "what happens to the first vector when a third one arrives in a window of two?"


GOOD = """# %% nbgrader={"grade_id": "f", "solution": true}
def f():
    ### BEGIN SOLUTION
    return 1
    ### END SOLUTION

# %% nbgrader={"grade_id": "c", "grade": true, "points": 1}
# property: one.
# hint: two.
assert f() == 1, "saw"
"""
MISTAKES = [
    ('"grade_id": "c"', '"grade_id": "f"', "unique"),
    ('"grade_id": "c"', '"grade_id": "a b"', "letters"),
    (', "points": 1', "", "points"),
    ("# hint: two.\n", "", "hint"),
    ("# property: one.\n", "", "property"),
    (', "saw"', "", "message"),
    ("    ### BEGIN SOLUTION\n", "", "BEGIN SOLUTION"),
    ("def f():", "def f(:", "invalid syntax"),
    ('"points": 1}', '"points": 1} inferlab={"where": "nowhere"}', "where"),
    ('"points": 1}', '"points": 1} inferlab={"upstream": ["f"]}', "where"),
    ('"points": 1', '"points": 1, "color": "red"', "color"),
    ("assert f()", "assert reference.f() == f()", "reference"),
    ("# hint: two.\n", "# hint: two.\n### BEGIN HIDDEN TESTS\n", "hidden"),
    ('nbgrader={"grade_id": "f", "solution": true}', "", "grade_id"),
]


@pytest.mark.parametrize(("old", "new", "word"), MISTAKES)
def test_an_authors_mistake_is_named(tmp_path: Path, old: str, new: str, word: str) -> None:
    path = tmp_path / "01_x" / "x.py"
    path.parent.mkdir()
    path.write_text(GOOD)
    lab_from_notebook(solution_notebook(path), "01_x", "x")
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(LabError, match=word):
        solution_notebook(path)


def test_the_labs_of_the_repository_are_built() -> None:
    files = build_labs(data_root())
    assert not differing(files), "run: python -m grader.labs.lab_source"
