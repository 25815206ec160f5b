"""Which file is whose: the layouts of folders and zips that are understood, and student ids that are not."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from grader.collect import Handed, _choose, _student, _without_outer_folder


def assigned(*paths: str) -> dict[str, str]:
    """Student to the path taken, for files handed in at `paths`."""
    files = _without_outer_folder(
        [Handed(PurePosixPath(p), p.encode(), None) for p in paths], "02_kv_cache", "kv_cache.ipynb"
    )
    by_student: dict[str, list[Handed]] = {}
    for file in files:
        by_student.setdefault(_student(file.path), []).append(file)
    chosen = {student: _choose(of, "02_kv_cache", "kv_cache.ipynb") for student, of in by_student.items()}
    return {student: c if isinstance(c, str) else c.raw.decode() for student, c in chosen.items()}


@pytest.mark.parametrize(
    "paths",
    [
        ("ada/02_kv_cache/kv_cache.ipynb", "bob/02_kv_cache/kv_cache.ipynb"),
        ("ada/kv_cache.ipynb", "bob/kv_cache.ipynb"),
        ("ada/anything.ipynb", "bob/kv_cache.ipynb"),
        ("ada.ipynb", "bob.ipynb"),
        ("lab02/ada.ipynb", "lab02/bob.ipynb"),
        ("lab02/ada/kv_cache.ipynb", "lab02/bob/kv_cache.ipynb"),
    ],
)
def test_layouts_that_are_understood(paths: tuple[str, ...]) -> None:
    assert assigned(*paths) == dict(zip(("ada", "bob"), paths, strict=True))


@pytest.mark.parametrize("path", ["ada/kv_cache.ipynb", "ada.ipynb", "handed/ada/kv_cache.ipynb"])
def test_a_single_submission_is_understood_too(path: str) -> None:
    assert assigned(path) == {"ada": path}


def test_of_several_files_the_one_with_the_labs_name_is_taken() -> None:
    assert assigned("ada/kv_cache.ipynb", "ada/notes.ipynb") == {"ada": "ada/kv_cache.ipynb"}
    assert assigned("ada/01_x/kv_cache.ipynb", "ada/02_kv_cache/kv_cache.ipynb", "bob.ipynb") == {
        "ada": "ada/02_kv_cache/kv_cache.ipynb",
        "bob": "bob.ipynb",
    }
    assert "none of them is named" in assigned("ada/a.ipynb", "ada/b.ipynb", "bob.ipynb")["ada"]
