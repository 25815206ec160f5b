"""nbgrader's exchange is writable for everybody: what one user puts there in another's name does not count."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from grader.course import CourseError
from grader.submissions.collect import collect

ANSWER = "class Window:\n    pass"
MARCH = "2027-03-01 10:00:00 UTC"


def inbound(folder: Path, notebook: Callable[..., bytes], *names: str) -> Path:
    for name in names:
        handed = folder / name
        handed.mkdir(parents=True)
        (handed / "toy.ipynb").write_bytes(notebook(ANSWER))
    return folder


@pytest.fixture
def of_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's files are ada's, and somebody else collects."""
    monkeypatch.setattr(os, "geteuid", lambda: -2)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="ada"))


def now(seconds: int = 0) -> str:
    return f"{datetime.now(UTC) + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S} UTC"


@pytest.mark.parametrize(
    "claimed", ["alan", "ada\u200b", "\u202eada", "ad\u0430", "e\u0301ve", "ada+ada", "Ada", "ada\\u200b"]
)
def test_a_submission_in_somebody_elses_name_is_left_out(
    root: Path, notebook: Callable[..., bytes], tmp_path: Path, of_ada: None, claimed: str
) -> None:
    folder = inbound(tmp_path / "inbound", notebook, f"ada+01_toy+{now()}+bbbb", f"{claimed}+01_toy+2099-{now()[5:]}+c")
    done = collect(root, "01_toy", folder)
    assert [one.student for one in done.received] == ["ada"]
    assert len(done.ignored) == 1
    assert done.ignored[0].parts[0].isprintable()
    assert "belongs to ada: left out" in done.warnings[0]


def test_a_user_without_a_name_here_is_nobody(
    root: Path, notebook: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = inbound(tmp_path / "inbound", notebook, f"ada+01_toy+{now()}+bbbb")

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(os, "geteuid", lambda: -2)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(CourseError, match="no notebook in"):
        collect(root, "01_toy", folder)


def test_a_copy_that_the_instructor_made_counts_and_is_said(
    root: Path, notebook: Callable[..., bytes], tmp_path: Path
) -> None:
    done = collect(root, "01_toy", inbound(tmp_path / "inbound", notebook, f"ada+01_toy+{MARCH}+bbbb"))
    assert [one.student for one in done.received] == ["ada"]
    assert done.warnings == ["belong to you, so that only a name says whose they are (1): ada"]


def test_two_spellings_of_one_user_stop_with_a_question(
    root: Path, notebook: Callable[..., bytes], tmp_path: Path
) -> None:
    """In a copy no owner tells them apart; the question does."""
    folder = inbound(tmp_path / "in", notebook, *(f"{name}+01_toy+{MARCH}+b" for name in ("\u00e9ve", "e\u0301ve")))
    with pytest.raises(CourseError, match=r"two claim to be one student(.|\n)*e\\u0301ve.* and \\xe9ve.*"):
        collect(root, "01_toy", folder)
    assert not (root / "received").exists()
    assert not (root / "roster.json").exists()


def test_of_a_folders_name_and_its_files_the_later_time_counts(
    root: Path, notebook: Callable[..., bytes], tmp_path: Path, of_ada: None
) -> None:
    folder = inbound(tmp_path / "inbound", notebook, "ada+01_toy+2020-01-01 10:00:00 UTC+bbbb")
    os.utime(next(folder.rglob("*.ipynb")), (1, 1))  # a student can do this, too
    one = collect(root, "01_toy", folder).received[0]
    assert one.time[:4] >= "2026"
    assert one.time_from == "the files' own times"  # shown and asked about before it costs anything
    assert "2020-01-01 10:00 by its folder's name" in one.notes[0]


def test_what_took_a_moment_to_copy_was_in_time(
    root: Path, notebook: Callable[..., bytes], tmp_path: Path, of_ada: None
) -> None:
    named = now()
    one = collect(root, "01_toy", inbound(tmp_path / "inbound", notebook, f"ada+01_toy+{named}+b")).received[0]
    assert (one.time[:19].replace("T", " "), one.time_from) == (named[:19], "exchange's name for it")


@pytest.mark.parametrize("planted", ["alan", "alan_4242_1_toy.ipynb", "Alan_7_assignsubmission_file"])
def test_where_everybody_can_write_only_owned_folders_count(
    root: Path,
    notebook: Callable[..., bytes],
    tmp_path: Path,
    of_ada: None,
    monkeypatch: pytest.MonkeyPatch,
    planted: str,
) -> None:
    folder = inbound(tmp_path / "inbound", notebook)
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for number in range(3):
        inbound(folder, notebook, f"{planted}{number}")
    info = folder.lstat()
    owner = SimpleNamespace(st_uid=info.st_uid + 1, st_mode=info.st_mode)
    lstat = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: owner if path == folder else lstat(path))
    with pytest.raises(CourseError, match="form exchange"):
        collect(root, "01_toy", folder)
    inbound(folder, notebook, f"ada+01_toy+{now()}+b")
    assert [one.student for one in collect(root, "01_toy", folder).received] == ["ada"]
