"""nbgrader's exchange is writable for everybody: what one user puts there in another's name does not count."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from grader.submissions.collect import collect, folder_owner

ANSWER = "class Window:\n    pass"


def inbound(folder: Path, notebook: Callable[..., bytes], *names: str) -> Path:
    for name in names:
        handed = folder / name
        handed.mkdir(parents=True)
        (handed / "toy.ipynb").write_bytes(notebook(ANSWER))
    return folder


def test_a_submission_in_somebody_elses_name_is_left_out(
    root: Path, notebook: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alan, ada = "alan+01_toy+2027-03-01 10:00:00 UTC+aaaa", "ada+01_toy+2027-03-01 10:00:00 UTC+bbbb"
    forged = "alan+01_toy+2027-03-01 11:00:00 UTC+cccc"
    folder = inbound(tmp_path / "inbound", notebook, alan, ada, forged)
    owners = {alan: "alan", ada: "ada", forged: "ada"}
    monkeypatch.setattr("grader.submissions.collect.folder_owner", lambda path: owners[path.name])
    done = collect(root, "01_toy", folder)
    assert sorted(one.student for one in done.received) == ["ada", "alan"]
    assert [path.parts[0] for path in done.ignored] == [forged]


def test_a_copy_that_the_instructor_made_counts(root: Path, notebook: Callable[..., bytes], tmp_path: Path) -> None:
    folder = inbound(tmp_path / "inbound", notebook, "ada+01_toy+2027-03-01 10:00:00 UTC+bbbb")
    assert [one.student for one in collect(root, "01_toy", folder).received] == ["ada"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_owner_is_the_user_whom_the_system_knows(tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    os.chown(tmp_path, nobody.pw_uid, nobody.pw_gid)
    assert folder_owner(tmp_path) == "nobody"
    os.chown(tmp_path, 59_999, 59_999)
    assert folder_owner(tmp_path) is None
