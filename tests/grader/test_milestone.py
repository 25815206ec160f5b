"""After a lab's last point, and not before, the engine serves a text with the learner's part; every lab has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from grader.cli import app
from grader.labs.lab import load_lab

ROOT = Path(__file__).parents[2]
LABS = sorted((ROOT / "labs").glob("[0-9]*_*/*.ipynb"))


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.parent.name)
def test_every_lab_ends_with_a_milestone_that_calls_the_learners_part_in_the_engine(path: Path) -> None:
    lab = load_lab(path)
    (cell,) = [cell for cell in lab.of_kind("code") if cell.where == "milestone"]
    assert "LabEngine(" in cell.source or "speculating(" in cell.source
    assert "show_served(" in cell.source
    ids = [cell.grade_id for cell in lab.cells]
    assert ids.index("milestone") > max(ids.index(check.grade_id) for check in lab.of_kind("check"))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    return tmp_path / "home"


@pytest.mark.timeout(300)
def test_a_check_that_passes_shows_what_the_learners_cache_served_and_its_numbers(workspace: Path) -> None:
    solved = ROOT / "solutions/02_kv_cache/kv_cache.ipynb"
    done = CliRunner().invoke(app, ["lab", "check", "02", "--file", str(solved)])
    assert done.exit_code == 0, done.output
    assert "Your cache just served this text:\n\ndef open_file(file):\n" in done.output
    assert "return open(file, 'rb')" in done.output
    assert "19 new tokens in 19 steps; 25 tokens computed;" in done.output
    assert "hold 25 tokens each" in done.output


@pytest.mark.timeout(300)
def test_a_check_that_does_not_pass_shows_none(workspace: Path) -> None:
    released = ROOT / "labs/02_kv_cache/kv_cache.ipynb"
    done = CliRunner().invoke(app, ["lab", "check", "02", "--file", str(released)])
    assert done.exit_code == 1
    assert "just served" not in done.output
