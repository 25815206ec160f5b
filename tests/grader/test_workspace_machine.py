"""Any order of a learner's doings, new versions, updates, crashes and saves in between: no byte of the learner is lost.

The rules work on real folders. A crash is a process that ends at the k-th file operation, without any clean-up.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from grader.study import workspace
from grader.study.workspace import STATE_NAME, Prepared, WorkspaceError, prepare
from grader.study.workspace_files import version_of
from tests.examples import examples

CHAPTER = "chapters/02_kv_cache/a.ipynb"
PAGE = "labs/AGENTS.md"
ALL = (CHAPTER, PAGE)
NAMES = st.sampled_from(ALL)
OPERATIONS = ("replace", "link", "open", "unlink", "fsync", "chmod")  # of os: where a crash or a save happens
MOST = 30  # operations of one prepare on two files, and some more
WHEN = st.integers(1, MOST)


def notebook(text: str) -> bytes:
    cell = {"cell_type": "code", "id": "one", "metadata": {}, "source": [text], "execution_count": None, "outputs": []}
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def before_operation(when: int, happens: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Lets something happen before the when-th of the operations on files that follow."""
    left = [when]

    def counting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                happens()
            return operation(*arguments, **options)

        return call

    for name in OPERATIONS:
        patch.setattr(os, name, counting(getattr(os, name)))


def set_up(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The course and the learner's home are in this folder."""
    patch.setattr(workspace, "chapters_root", lambda: folder / "course" / "chapters")
    patch.setattr(workspace, "data_root", lambda: folder / "course")
    patch.setattr(workspace, "in_checkout", lambda: False)
    patch.setattr(os, "fsync", lambda descriptor: None)  # a kill is not a power cut, and a disk is slow
    patch.setenv("INFERLAB_HOME", str(folder / "home"))


def update(when: int) -> int:
    """Update in a fork, which ends, as if killed, before the when-th operation on files; returns its id.

    One that ends otherwise, and without an exception, has the same status, 0: there may be fewer operations.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            before_operation(when, lambda: os._exit(0), pytest.MonkeyPatch())
            prepare(update=True)
            status = 0
        finally:
            os._exit(status)
    return child


def serve_updates() -> None:
    """A line `["FOLDER", [WHEN, ...]]` for updates that run at the same time; answers with their statuses."""
    for line in sys.stdin:
        folder, moments = json.loads(line)
        with pytest.MonkeyPatch.context() as patch:
            set_up(Path(folder), patch)
            children = [update(when) for when in moments]
            print(json.dumps([os.waitpid(child, 0)[1] for child in children]), flush=True)


SERVER = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tests_of_workspaces", {__file__!r})
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
tests.serve_updates()
"""


class Updates:
    """A process that forks for each update: this one has imported torch by now, and takes ten times as long to fork."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, folder: Path, *moments: int) -> None:
        if self._process is None:
            command, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
            root = str(Path(__file__).parents[2])
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), moments]), file=self._process.stdin, flush=True)
        assert json.loads(self._process.stdout.readline()) == [0] * len(moments)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=600)
            self._process = None


NEVER = 10**9  # more operations than there are
updates = Updates()


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    updates.close()


class Learner(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="workspace-"))
        self.home, self.course, self.outside = (self.folder / n for n in ("home", "course", "outside"))
        self.outside.mkdir()
        self.patch = pytest.MonkeyPatch()
        set_up(self.folder, self.patch)
        self.number = 0
        self.mine: set[bytes] = set()  # what the learner saved, and neither wrote over nor deleted
        self.shipped: set[bytes] = set()
        self.clean = set(ALL)  # names under which the learner has at most run or reformatted something
        self.new_versions()
        prepare()

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------ what the learner does

    def fresh(self, name: str, note: str) -> bytes:
        self.number += 1
        text = f"# {note} {self.number}"
        return notebook(text) if name.endswith(".ipynb") else text.encode()

    def forget(self, path: Path) -> None:
        if path.is_file():
            self.mine.discard(path.read_bytes())

    def save(self, path: Path, content: bytes, in_place: bool) -> None:
        self.forget(path)
        if in_place:
            path.write_bytes(content)
        else:
            (path.parent / "editor-temporary").write_bytes(content)
            (path.parent / "editor-temporary").replace(path)
        self.mine.add(content)

    def path(self, name: str) -> Path | None:
        path = self.home / name
        return path if path.is_file() else None

    @rule(name=NAMES, in_place=st.booleans())
    def edits(self, name: str, in_place: bool) -> None:
        if path := self.path(name):
            self.clean.discard(name)
            self.save(path, self.fresh(name, "mine"), in_place)

    @rule(in_place=st.booleans(), extra=st.booleans())
    def runs(self, in_place: bool, extra: bool) -> None:
        if path := self.path(CHAPTER):
            raw: dict[str, Any] = json.loads(path.read_bytes())
            self.number += 1
            raw["cells"][0]["execution_count"] = self.number
            raw["metadata"]["language_info"] = {"version": "3.12"}
            if extra:  # Shift-Enter in the last cell
                raw["cells"].append({**raw["cells"][0], "id": f"new{self.number}", "source": []})
            self.save(path, json.dumps(raw, indent=1).encode(), in_place)

    @rule(name=NAMES)
    def saves_with_an_editor_that_changes_line_ends(self, name: str) -> None:
        if path := self.path(name):
            self.number += 1
            content = path.read_bytes().rstrip().replace(b"\n", b"\r\n") + b" " * self.number + b"\r\n"
            self.save(path, content, in_place=True)

    @rule(name=NAMES)
    def deletes(self, name: str) -> None:
        if path := self.path(name):
            self.forget(path.resolve())
            path.unlink()

    @rule(name=NAMES, taken=st.sampled_from(["mine.ipynb", "a.new.ipynb", "a.old.ipynb"]))
    def renames_perhaps_to_a_name_we_would_use(self, name: str, taken: str) -> None:
        if path := self.path(name):
            self.clean.discard(name)
            target = path.with_name(taken)
            self.forget(target)
            path.replace(target)

    @rule(taken=st.sampled_from(["a.new.ipynb", "a.new2.ipynb", "a.old.ipynb", "notes.md"]))
    def adds_a_file(self, taken: str) -> None:
        path = self.home / Path(CHAPTER).with_name(taken)
        if path.parent.is_dir():
            self.save(path, self.fresh(taken, "added"), in_place=True)

    @rule(name=NAMES)
    def takes_the_new_version(self, name: str) -> None:
        path = self.home / name
        new = path.with_name(f"{path.stem}.new{path.suffix}")
        if path.is_file() and new.is_file():
            self.clean.discard(name)
            self.forget(path)
            new.replace(path)

    @rule(name=NAMES)
    def makes_a_folder_of_that_name(self, name: str) -> None:
        if path := self.path(name):
            self.clean.discard(name)
            self.forget(path.resolve())
            path.unlink()
            path.mkdir()

    @rule(name=NAMES)
    def takes_the_folder_away(self, name: str) -> None:
        if (self.home / name).is_dir():
            (self.home / name).rmdir()

    @rule(name=NAMES, dangling=st.booleans())
    def keeps_the_file_elsewhere_behind_a_link(self, name: str, dangling: bool) -> None:
        path = self.path(name)
        if path and not path.is_symlink():
            self.clean.discard(name)
            self.number += 1
            elsewhere = self.outside / f"{self.number}{path.suffix}"
            path.replace(elsewhere)
            path.symlink_to(self.outside / "nothing" if dangling else elsewhere)

    @rule(name=NAMES)
    def protects(self, name: str) -> None:
        if path := self.path(name):
            self.clean.discard(name)
            path.chmod(stat.S_IRUSR)

    @rule()
    def makes_a_file_of_a_folder(self) -> None:
        folder = self.home / "chapters/02_kv_cache"
        if folder.is_dir():
            self.clean.discard(CHAPTER)
            folder.replace(self.outside / f"folder{self.number}")
            self.save(folder, self.fresh("x.md", "a file"), in_place=True)
            self.number += 1

    @rule(damage=st.sampled_from([None, "", "{", '{"ours": {}, "given": []}', '{"ours": [], "given": {}}']))
    def loses_the_state(self, damage: str | None) -> None:
        self.clean.clear()  # what we copied is not known any more
        (self.home / STATE_NAME).unlink(missing_ok=True)
        if damage is not None:
            (self.home / STATE_NAME).write_text(damage)

    # ------------------------------------------------------------ what the course does

    @rule()
    def new_versions(self) -> None:
        for name in ALL:
            content = self.fresh(name, "course")
            self.shipped.add(content)
            (self.course / name).parent.mkdir(parents=True, exist_ok=True)
            (self.course / name).write_bytes(content)

    @rule(update=st.booleans())
    def prepares(self, update: bool) -> None:
        self.check(prepare(update), update)

    @rule()
    def updates_to_a_new_version(self) -> None:
        self.new_versions()
        self.prepares(update=True)

    @rule(when=WHEN)
    def is_killed_while_updating(self, when: int) -> None:
        self.new_versions()
        updates(self.folder, when)

    @rule()
    def two_update_at_once(self) -> None:
        self.new_versions()
        updates(self.folder, NEVER, NEVER)

    @rule(when=WHEN, name=NAMES, in_place=st.booleans())
    def an_editor_saves_during_an_update(self, when: int, name: str, in_place: bool) -> None:
        def save() -> None:
            path = self.home / name
            if path.parent.is_dir() and not path.is_symlink() and not path.is_dir():
                self.clean.discard(name)
                self.save(path, self.fresh(name, "between"), in_place)

        self.new_versions()
        with pytest.MonkeyPatch.context() as patch:
            before_operation(when, save, patch)
            prepare(update=True)

    # ------------------------------------------------------------ what must hold

    def check(self, prepared: Prepared, update: bool) -> None:
        for name in self.clean if update else ():
            path = self.home / name
            assert name not in prepared.beside, f"{name}: the learner wrote nothing in it, and got a second file"
            newest = (self.course / name).read_bytes()
            assert version_of(path.read_bytes()).text == version_of(newest).text, f"{name} is not the newest"
        for name in ALL:
            assert name in prepared.blocked or (self.home / name).is_file(), f"{name} is missing"
        assert prepare(update).copied == []

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "folder"):
            places = (self.home, self.outside)
            there = {path.read_bytes() for place in places for path in place.rglob("*") if path.is_file()}
            assert not self.mine - there - self.shipped, "a file of the learner is gone"


Learner.TestCase.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLearner = Learner.TestCase


def at_every_operation() -> Iterator[tuple[int, Learner]]:
    """(k, a learner in a new workspace), k up to more than the operations of an update."""
    for when in range(1, MOST + 1):
        learner = Learner()
        learner.begin()
        try:
            yield when, learner
        finally:
            learner.teardown()


DOINGS = {
    "nothing": lambda learner: None,
    "runs": lambda learner: learner.runs(True, True),
    "edits": lambda learner: learner.edits(CHAPTER, True),
    "deletes": lambda learner: learner.deletes(CHAPTER),
}
whatever_the_learner = pytest.mark.parametrize("does", DOINGS.values(), ids=DOINGS)


@whatever_the_learner
def test_an_update_killed_at_any_operation_is_finished_by_the_next(does: Callable[[Learner], None]) -> None:
    for when, learner in at_every_operation():
        does(learner)
        learner.is_killed_while_updating(when)
        learner.nothing_is_lost()
        learner.prepares(update=True)
        learner.nothing_is_lost()


@whatever_the_learner
def test_an_update_killed_at_any_operation_is_overtaken_by_the_version_after(does: Callable[[Learner], None]) -> None:
    for when, learner in at_every_operation():
        does(learner)
        learner.is_killed_while_updating(when)
        learner.updates_to_a_new_version()
        learner.nothing_is_lost()


@pytest.mark.parametrize("in_place", [False, True], ids=["renamed", "in_place"])
@whatever_the_learner
def test_what_an_editor_saves_at_any_moment_of_an_update_is_kept(
    does: Callable[[Learner], None], in_place: bool
) -> None:
    for when, learner in at_every_operation():
        does(learner)
        learner.an_editor_saves_during_an_update(when, CHAPTER, in_place)
        learner.nothing_is_lost()
        learner.updates_to_a_new_version()
        learner.nothing_is_lost()


def test_a_disk_that_is_full_at_any_operation_costs_nothing() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    failed = 0
    for when, learner in at_every_operation():
        learner.runs(True, True)
        learner.new_versions()
        with pytest.MonkeyPatch.context() as patch:
            before_operation(when, full, patch)
            try:
                prepare(update=True)
            except WorkspaceError:
                failed += 1
        learner.nothing_is_lost()
        assert all((learner.home / name).is_file() for name in ALL), f"a file is missing after failure {when}"
        learner.prepares(update=True)
    assert failed > 10
