from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from grader.study import workspace
from grader.study.workspace import STATE_NAME, WorkspaceError, prepare

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


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"ours": 3, "given": {}}', '{"ours": {"x": [{"y": 1}]}, "given": {}}']
)
def test_a_damaged_state_file_costs_nobody_their_edits(course: Path, damage: str) -> None:
    home = prepare().home
    (home / NOTEBOOK).write_text("my notes")
    (home / STATE_NAME).write_text(damage)
    (course / NOTEBOOK).write_text("version 2")
    prepare(update=True)
    assert (home / NOTEBOOK).read_text() == "my notes"
    assert set(json.loads((home / STATE_NAME).read_text())) == {"ours", "given"}


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

    monkeypatch.setattr(workspace, "place", full)
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


# ---------------------------------------------------------------- read and run, but not edited

OLD = "chapters/02_kv_cache/chapter.old.ipynb"


def notebook(text: str, run: int | None = None) -> bytes:
    cell = {"cell_type": "code", "metadata": {}, "source": [text], "execution_count": run, "outputs": []}
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def test_a_notebook_that_was_only_run_is_updated_and_its_run_copy_put_aside(course: Path) -> None:
    (course / NOTEBOOK).write_bytes(notebook("x = 1"))
    home = prepare().home
    (home / NOTEBOOK).write_bytes(notebook("x = 1", run=7))
    assert not prepare(update=True).kept, "there is no newer version"
    (course / NOTEBOOK).write_bytes(notebook("x = 2"))
    prepared = prepare(update=True)
    assert prepared.kept == {NOTEBOOK: OLD}
    assert not prepared.beside
    assert (home / NOTEBOOK).read_bytes() == notebook("x = 2")
    assert (home / OLD).read_bytes() == notebook("x = 1", run=7)


def test_a_read_only_file_and_a_link_are_the_learners(course: Path, tmp_path: Path) -> None:
    home = prepare().home
    (home / NOTEBOOK).chmod(0o444)
    (home / LAB).replace(tmp_path / "elsewhere")
    (home / LAB).symlink_to(tmp_path / "elsewhere")
    for name in (NOTEBOOK, LAB):
        (course / name).write_text("version 2")
    assert set(prepare(update=True).beside) == {NOTEBOOK, LAB}
    assert (home / NOTEBOOK).read_text() == (tmp_path / "elsewhere").read_text() == "version 1"
    assert (home / LAB).is_symlink()


def test_what_is_in_the_way_is_left_alone_and_named_and_the_rest_goes_on(course: Path) -> None:
    home = prepare().home
    (home / NOTEBOOK).unlink()
    (home / NOTEBOOK).mkdir()
    (course / NOTEBOOK).write_text("version 2")
    (course / LAB).write_text("version 2")
    prepared = prepare(update=True)
    assert prepared.blocked == {NOTEBOOK: "it is a folder"}
    assert prepared.updated == [LAB]


def test_without_hard_links_nothing_is_lost_either(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    (course / NOTEBOOK).write_bytes(notebook("x = 1"))
    home = prepare().home
    (home / NOTEBOOK).write_bytes(notebook("x = 1", run=7))
    (home / LAB).write_text("my solution")
    (course / NOTEBOOK).write_bytes(notebook("x = 2"))
    (course / LAB).write_text("version 2")
    prepared = prepare(update=True)
    assert prepared.kept == {NOTEBOOK: OLD}
    assert prepared.beside == {LAB: "labs/02_kv_cache/kv_cache.new.ipynb"}
    assert (home / OLD).read_bytes() == notebook("x = 1", run=7)
    assert (home / LAB).read_text() == "my solution"


def test_one_waits_for_the_other_but_not_for_ever(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = prepare().home
    (course / LAB).write_text("version 2")
    other = os.open(home, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    waits: list[float] = []
    monkeypatch.setattr(workspace.time, "sleep", lambda seconds: (waits.append(seconds), os.close(other)))
    assert prepare(update=True).updated == [LAB]
    assert len(waits) == 1, "it goes on when the other has ended"
    (course / LAB).write_text("version 3")
    other = os.open(home, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(workspace.time, "sleep", waits.append)
    assert prepare(update=True).updated == [LAB]
    assert sum(waits[1:]) == pytest.approx(workspace.PATIENCE)
    os.close(other)


def test_a_notebook_that_the_course_has_renamed_keeps_what_the_learner_wrote_in_it(
    course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = course / NOTEBOOK, "chapters/02_kv_cache/a_kept.ipynb"
    old.write_bytes(notebook("x = 1"))
    home = prepare().home
    (home / NOTEBOOK).write_bytes(notebook("my x", run=1))
    old.rename(course / new)
    (course / new).write_bytes(notebook("x = 2"))
    monkeypatch.setattr(workspace, "RENAMED", {NOTEBOOK: new})
    prepared = prepare(update=True)
    assert prepared.renamed == {NOTEBOOK: new}
    assert prepared.beside == {new: "chapters/02_kv_cache/a_kept.new.ipynb"}
    assert (home / new).read_bytes() == notebook("my x", run=1)
    assert not (home / NOTEBOOK).exists()
    (home / NOTEBOOK).write_bytes(notebook("saved again from a tab that was open"))
    assert not prepare().renamed, "the new name is taken"
    assert (home / NOTEBOOK).read_bytes() == notebook("saved again from a tab that was open")


def test_a_renamed_notebook_that_was_only_run_is_still_known_as_the_courses_own(
    course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = "chapters/02_kv_cache/a_kept.ipynb"
    (course / NOTEBOOK).write_bytes(notebook("x = 1"))
    home = prepare().home
    (home / NOTEBOOK).write_bytes(notebook("x = 1", run=1))
    (course / NOTEBOOK).rename(course / new)
    (course / new).write_bytes(notebook("x = 2"))
    monkeypatch.setattr(workspace, "RENAMED", {NOTEBOOK: new})
    assert prepare().outdated == [new]
    assert prepare(update=True).kept == {new: "chapters/02_kv_cache/a_kept.old.ipynb"}
    assert (home / new).read_bytes() == notebook("x = 2")


def test_every_renamed_notebook_is_in_the_course_under_its_new_name_only() -> None:
    there = {relative for relative, _ in workspace.course_files()}
    assert set(workspace.RENAMED.values()) <= there
    assert not set(workspace.RENAMED) & there


def test_no_two_notebooks_of_the_course_have_one_name() -> None:
    """A tab of JupyterLab shows the name of the file alone."""
    names = [Path(relative).name for relative, _ in workspace.course_files() if relative.endswith(".ipynb")]
    assert sorted(names) == sorted(set(names))
