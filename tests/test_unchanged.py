"""What was tried before is drawn from, as long as nothing that it needs has changed, and never otherwise."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import unchanged
from tests.closure import ROOT, forget
from tests.drawn import is_drawn, is_left

KERNEL = "tests/kernels/test_one.py"
NOTEBOOK = f"{unchanged.RUNS}warm-01_a-intro]"
TREE = {
    "engine/low.py": "",
    "engine/high.py": "import engine.low\n",
    "engine/other.py": "",
    "chapters/01_a/intro.py": "import engine.high\n",
    "chapters/02_b/other.py": "",
    KERNEL: "import engine.low\n",
    "tests/kernels/test_two.py": "",
    "tests/serving/test_three.py": "",
    "grader/chapter_source.py": "",
    "tests/warm.py": "",
    "tests/chapters/prose.py": "",
    unchanged.NOTEBOOKS: "",
}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    forget()
    unchanged.begin(tmp_path)
    unchanged.record(tmp_path)
    yield tmp_path
    forget()


def planned(root: Path) -> dict[str, Any]:
    forget()
    unchanged.begin(root)
    made: dict[str, Any] = json.loads((root / unchanged.PLAN).read_text())
    return made


def could_be_left(root: Path) -> set[str]:
    """Units of which a run that begins now may leave out tests."""
    made = planned(root)
    return {unit for unit in made["now"]["units"] if list(unchanged.ends_of(unit)) in made["unchanged"]}


EVERY = {KERNEL, "tests/kernels/test_two.py", "chapters/01_a/intro.py", "chapters/02_b/other.py"}


def test_units_are_notebooks_and_files_of_tests_that_compute(root: Path) -> None:
    assert could_be_left(root) == EVERY


@pytest.mark.parametrize(
    ("changed", "run"),
    [
        ("engine/low.py", {KERNEL, "chapters/01_a/intro.py"}),
        ("engine/high.py", {"chapters/01_a/intro.py"}),
        ("engine/other.py", set()),
        ("chapters/02_b/other.py", {"chapters/02_b/other.py"}),
        (KERNEL, {KERNEL}),
        ("tests/warm.py", {"chapters/01_a/intro.py", "chapters/02_b/other.py"}),
        (unchanged.NOTEBOOKS, {"chapters/01_a/intro.py", "chapters/02_b/other.py"}),
    ],
)
def test_what_needs_a_file_that_changed_runs(root: Path, changed: str, run: set[str]) -> None:
    (root / changed).write_text(TREE[changed] + "# one byte more\n")
    assert could_be_left(root) == EVERY - run


def test_without_a_record_with_other_versions_and_of_what_is_new_all_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "tests/kernels/test_new.py").write_text("")
    assert could_be_left(root) == EVERY
    monkeypatch.setattr(unchanged, "versions", lambda also: {"torch": "another"})
    assert could_be_left(root) == set()
    monkeypatch.undo()
    (root / unchanged.RECORD).unlink()
    assert could_be_left(root) == set()


def test_what_changes_while_all_tests_run_is_not_recorded_as_tried(root: Path) -> None:
    unchanged.begin(root)
    (root / "engine/low.py").write_text("x = 1\n")
    unchanged.record(root)
    assert could_be_left(root) == EVERY - {KERNEL, "chapters/01_a/intro.py"}


def test_a_third_of_the_tests_is_drawn_and_each_has_its_turn() -> None:
    names = [f"{KERNEL}::test_it[{number}]" for number in range(300)]
    drawn = Counter(name for commit in map(str, range(60)) for name in names if is_drawn(name, commit))
    assert 5400 < drawn.total() < 6600
    assert set(drawn) == set(names)


def test_only_tests_of_units_that_are_unchanged_are_left(root: Path) -> None:
    (root / KERNEL).write_text("x = 1\n")
    made = planned(root)
    commit = next(str(number) for number in range(1000) if not is_drawn(NOTEBOOK, str(number)))
    made["commit"] = commit
    assert is_left(NOTEBOOK, made)
    assert not is_left(NOTEBOOK.replace("intro", "new"), made)
    assert not is_left(NOTEBOOK.replace("runs_from_top_to_bottom", "equals_its_source"), made)
    assert not any(is_left(f"{KERNEL}::test_{n}", made) for n in range(30))
    assert not any(is_left(f"tests/serving/test_three.py::test_{n}", made) for n in range(30))
    left = [is_left(f"tests/kernels/test_two.py::test_{n}", made) for n in range(30)]
    assert any(left)
    assert not all(left)


def test_every_notebook_and_folder_of_the_course_is_a_unit() -> None:
    found = unchanged.units()
    sources = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("chapters/[0-9]*/*.py")}
    assert sources <= found.keys()
    assert {name.split("/")[1] for name in found.keys() - sources} == set(unchanged.FOLDERS)
    assert "tests/kernels/test_attention_kernels.py" in found
