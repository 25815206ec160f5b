from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from grader import workspace
from grader.workspace import STATE_NAME, WorkspaceError, prepare

NOTEBOOK = "chapters/02_kv_cache/chapter.ipynb"
LAB = "labs/02_kv_cache/kv_cache.ipynb"


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small course of our own, and a workspace that does not exist yet."""
    root = tmp_path / "course"
    for name in (NOTEBOOK, LAB, "chapters/02_kv_cache/.ipynb_checkpoints/chapter-checkpoint.ipynb"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("version 1")
    (root / "chapters/02_kv_cache/chapter.py").write_text("source")
    (root / "labs/AGENTS.md").write_text("tutor")
    (root / "labs/README.md").write_text("for those who change the labs")
    monkeypatch.setattr(workspace, "chapters_root", lambda: root / "chapters")
    monkeypatch.setattr(workspace, "data_root", lambda: root)
    monkeypatch.setattr(workspace, "in_checkout", lambda: True)
    monkeypatch.setenv("INFERLAB_HOME", str(tmp_path / "home"))
    return root


def files(home: Path) -> set[str]:
    return {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}


def test_the_first_time_copies_notebooks_and_labs_and_nothing_else(course: Path) -> None:
    prepared = prepare()
    assert files(prepared.home) == {NOTEBOOK, LAB, "labs/AGENTS.md", STATE_NAME}
    assert sorted(prepared.copied) == sorted([NOTEBOOK, LAB, "labs/AGENTS.md"])


def test_a_second_time_changes_nothing(course: Path) -> None:
    before = prepare().home.joinpath(NOTEBOOK).stat().st_mtime_ns
    again = prepare(update=True)
    assert not again.copied
    assert not again.updated
    assert not again.beside
    assert again.home.joinpath(NOTEBOOK).stat().st_mtime_ns == before


def test_a_deleted_notebook_comes_back(course: Path) -> None:
    home = prepare().home
    (home / NOTEBOOK).unlink()
    assert prepare().copied == [NOTEBOOK]
    assert (home / NOTEBOOK).read_text() == "version 1"


def test_a_new_version_waits_for_update(course: Path) -> None:
    home = prepare().home
    (course / NOTEBOOK).write_text("version 2")
    assert prepare().outdated == [NOTEBOOK]
    assert (home / NOTEBOOK).read_text() == "version 1"
    assert prepare(update=True).updated == [NOTEBOOK]
    assert (home / NOTEBOOK).read_text() == "version 2"


def test_update_never_overwrites_an_edited_notebook(course: Path) -> None:
    home = prepare().home
    (home / LAB).write_text("my solution")
    (course / LAB).write_text("version 2")
    assert prepare(update=True).beside == {LAB: "labs/02_kv_cache/kv_cache.new.ipynb"}
    assert (home / LAB).read_text() == "my solution"
    assert (home / "labs/02_kv_cache/kv_cache.new.ipynb").read_text() == "version 2"


def test_a_version_is_offered_once(course: Path) -> None:
    home = prepare().home
    (home / LAB).write_text("my solution")
    (course / LAB).write_text("version 2")
    prepare(update=True)
    again = prepare(update=True)
    assert not again.beside
    assert not again.outdated


def test_a_third_version_does_not_overwrite_the_second_which_may_be_edited_too(course: Path) -> None:
    home = prepare().home
    (home / LAB).write_text("my solution")
    for version in ("version 2", "version 3"):
        (course / LAB).write_text(version)
        prepare(update=True)
    assert (home / "labs/02_kv_cache/kv_cache.new.ipynb").read_text() == "version 2"
    assert (home / "labs/02_kv_cache/kv_cache.new2.ipynb").read_text() == "version 3"


def test_edits_without_a_new_version_are_left_in_peace(course: Path) -> None:
    home = prepare().home
    (home / NOTEBOOK).write_text("my notes")
    prepared = prepare(update=True)
    assert not prepared.beside
    assert not prepared.outdated
    assert (home / NOTEBOOK).read_text() == "my notes"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"copied": 3, "offered": {}}'])
def test_a_damaged_state_file_costs_nobody_their_edits(course: Path, damage: str) -> None:
    home = prepare().home
    (home / NOTEBOOK).write_text("my notes")
    (home / STATE_NAME).write_text(damage)
    (course / NOTEBOOK).write_text("version 2")
    prepare(update=True)
    assert (home / NOTEBOOK).read_text() == "my notes"
    assert set(json.loads((home / STATE_NAME).read_text())) == {"copied", "offered"}


def test_an_interrupted_write_leaves_the_old_file_whole(
    course: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        workspace.write_atomically(target, b"new")
    assert target.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "course"}


def test_a_full_disk_is_reported_with_what_to_do(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(workspace, "write_atomically", full)
    with pytest.raises(WorkspaceError, match="No space left on device.*INFERLAB_HOME"):
        prepare()


def test_the_workspace_may_not_lie_inside_the_repository(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERLAB_HOME", str(course / "work"))
    with pytest.raises(WorkspaceError, match="inside the repository.*Set INFERLAB_HOME"):
        prepare()
    assert not (course / "work").exists()


@pytest.mark.parametrize("taken", ["home", "home/chapters", "home/labs"])
def test_a_file_where_a_folder_is_needed_is_named(course: Path, tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("a file")
    with pytest.raises(WorkspaceError, match=f"{taken} is a file.*Move it away"):
        prepare()


def test_a_workspace_below_a_file_is_refused(course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").write_text("a file")
    monkeypatch.setenv("INFERLAB_HOME", str(tmp_path / "plain" / "below"))
    with pytest.raises(WorkspaceError, match="plain is a file"):
        prepare()


def test_an_unwritable_workspace_is_reported_with_what_to_do(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere but below /proc.
    monkeypatch.setenv("INFERLAB_HOME", "/proc/inferlab")
    with pytest.raises(WorkspaceError, match=r"cannot write.*/proc/inferlab.*INFERLAB_HOME"):
        prepare()


def test_an_empty_inferlab_home_means_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFERLAB_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert workspace.home() == tmp_path / "inferlab"
