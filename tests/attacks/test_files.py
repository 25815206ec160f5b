"""Hostile and broken files: each costs its own student what it should, and no other submission anything."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(2400)  # the first test grades all of them

ALL = {"check_window": 2.0, "check_len": 1.0, "check_calls": 3.0}
Notebook = dict[str, Any]


def cell(notebook: Notebook, grade_id: str) -> Any:
    return next(cell for cell in notebook["cells"] if cell["metadata"]["nbgrader"]["grade_id"] == grade_id)


def deleted_checks(notebook: Notebook) -> Notebook:
    notebook["cells"] = [c for c in notebook["cells"] if not c["metadata"]["nbgrader"]["grade"]]
    return notebook


def edited_checks(notebook: Notebook) -> Notebook:
    for grade_id in ALL:
        cell(notebook, grade_id)["source"] = "pass"
    return notebook


def doubled_checks(notebook: Notebook) -> Notebook:
    extra = copy.deepcopy(cell(notebook, "check_calls"))
    extra["source"] = "pass"
    notebook["cells"] = [extra, *notebook["cells"], extra, extra]
    return notebook


def renamed_checks(notebook: Notebook) -> Notebook:
    for number, grade_id in enumerate(ALL):
        found = cell(notebook, grade_id)
        found["metadata"]["nbgrader"]["grade_id"] = found["id"] = f"other-{number}"
    return notebook


def retyped_checks(notebook: Notebook) -> Notebook:
    for grade_id, kind in zip(ALL, ("markdown", "raw", "<script>"), strict=True):
        cell(notebook, grade_id)["cell_type"] = kind
    return notebook


def changed_points(notebook: Notebook) -> Notebook:
    for grade_id in ALL:
        cell(notebook, grade_id)["metadata"]["nbgrader"].update(points=1000, grade=True, solution=True, locked=False)
    extra = copy.deepcopy(cell(notebook, "Window"))
    extra["metadata"]["nbgrader"] |= {"grade_id": "bonus", "grade": True, "points": 50, "solution": False}
    notebook["cells"].append(extra | {"id": "bonus", "source": "pass"})
    return notebook


def claimed_scores(notebook: Notebook) -> Notebook:
    """Outputs and metadata that say what the grader would."""
    output = {"output_type": "execute_result", "data": {"text/plain": "1000.0"}, "metadata": {}, "execution_count": 1}
    for found in notebook["cells"]:
        if found["cell_type"] == "code":
            found["outputs"] = [output]
            found["metadata"]["nbgrader"] |= {"score": 1000, "comment": "<script>alert(1)</script>"}
    notebook["metadata"] |= {"kernelspec": {"name": "../../../bin/sh", "argv": ["touch", "/tmp/x"]}, "earned": 1000}
    return notebook


def stubs_of_the_lab_as_examiner(notebook: Notebook) -> Notebook:
    """Solution cells that ask to be run beside the tests."""
    for found in notebook["cells"]:
        found["metadata"]["inferlab"] = {"where": "examiner"}
    return notebook


def many_cells(notebook: Notebook) -> Notebook:
    """As many added cells as are read, and none of the lab's own: all of those are put back."""
    empty = {"cell_type": "markdown", "metadata": {}, "source": "x"}
    notebook["cells"] = [{**empty, "id": f"c{number}"} for number in range(2000)]
    return notebook


def much_code(notebook: Notebook) -> Notebook:
    """All code that is read in added cells; the lab's own cells are deleted and put back."""
    notebook["cells"] = [{"cell_type": "code", "metadata": {}, "source": "#" * 260_000, "id": "a"}]
    return notebook


def deep_code(notebook: Notebook) -> Notebook:
    """Code on which a compiler or whoever walks its tree could fall over."""
    deep = ["-" * 30_000 + "1", "(" * 190 + ")" * 190, "1" + "+1" * 20_000, "a" + ".b" * 10_000, "not " * 5000 + "x",
            "if 1:\n" + "".join(" " * i + "if 1:\n" for i in range(1, 99)) + " " * 99 + "x", "f'{" * 100 + "}'" * 100,
            "lambda:" * 2000 + "0", "[" * 5000, "x = " * 5000 + "1", '"%s" % ' * 3000 + "1", "*" * 5000,
            "\n".join("a" + ".b" * 900 for _ in range(20))]  # fmt: skip
    for number, source in enumerate(deep):
        made = {"cell_type": "code", "metadata": {}, "source": source, "id": f"deep-{number}", "outputs": []}
        notebook["cells"].insert(number, made | {"execution_count": None})
    return notebook


def slow_cells(notebook: Notebook) -> Notebook:
    made = {"cell_type": "code", "metadata": {}, "source": "import time; time.sleep(1.5)", "outputs": []}
    notebook["cells"] = [*({**made, "id": f"s{i}", "execution_count": None} for i in range(60)), *notebook["cells"]]
    return notebook


def script_everywhere(notebook: Notebook) -> Notebook:
    script = "<script>alert(1)</script>"
    for kind in ("markdown", "code", "raw"):
        notebook["cells"].append(
            {"cell_type": kind, "metadata": {}, "id": f"x-{kind}", "source": f"{script}\x1b[2J\x07"}
        )
    cell(notebook, "intro")["source"] = script
    cell(notebook, "check_len")["metadata"]["nbgrader"]["grade_id"] = script
    notebook["metadata"]["title"] = script
    return notebook


def much_text(notebook: Notebook) -> Notebook:
    """Texts that would make a page of 50 MiB."""
    made = {"cell_type": "markdown", "metadata": {}, "source": "<&>'\"\u202e" * 2500}
    notebook["cells"] += [{**made, "id": f"t{number}"} for number in range(500)]
    return notebook


# what is done to the solved notebook, which of its checks are then passed
EDITED: dict[str, tuple[Callable[[Notebook], Notebook], set[str], str]] = {
    "deleted_checks": (deleted_checks, set(ALL), "cell check_len is missing: it was put back"),
    "edited_checks": (edited_checks, set(ALL), "cell check_window is not yours to change"),
    "doubled_checks": (doubled_checks, set(ALL), ""),
    "renamed_checks": (renamed_checks, set(ALL), "3 were recognised by their text"),
    "retyped_checks": (retyped_checks, set(ALL), ""),
    "changed_points": (changed_points, set(ALL), "had its points or its grading marks changed"),
    "claimed_scores": (claimed_scores, set(ALL), ""),
    "asks_to_run_with_the_tests": (stubs_of_the_lab_as_examiner, set(ALL), ""),
    "deep_code": (deep_code, set(ALL), ""),
    "script_everywhere": (script_everywhere, set(ALL), ""),
    "many_cells": (many_cells, set(), ""),
    "much_text": (much_text, set(ALL), ""),
    "much_code": (much_code, set(), ""),
    "slow_cells": (slow_cells, set(), ""),
}
BROKEN = {
    "not_utf8": b"\xff\xfe\xfa{}\x80",
    "not_a_notebook": b"hello",
    "empty": b"",
    "a_list": b"[1, 2]",
    "deep": b"[" * 200_000,
    "deep_in_cells": b'{"cells": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "huge_number": b'{"nbformat": ' + b"9" * 10_000 + b"}",
    "a_zip_bomb_of_parts": b'{"cells": [' + b"[]," * 2_000_000 + b"[]]}",
    "cells_that_are_none": b'{"cells": [1, null, "x", []]}',
    "an_elf": b"\x7fELF" + bytes(5000),
}
LINKS = {
    "link_to_a_system_file": "/etc/passwd",
    "link_to_the_gradebook": "@ROOT@/gradebook.db",
    "link_to_the_secret": "@ROOT@/course_secret.json",
    "link_to_the_solution": "@ROOT@/solutions/01_toy/toy.ipynb",
    "link_to_anothers_notebook": "@HANDED@/a-honest.ipynb",
    "link_to_a_folder": "@ROOT@/solutions",
    "link_to_a_device": "/dev/zero",
    "link_to_itself": "link_to_itself.ipynb",
}
NAMES = ["a..", "-rf", "a;touch x", "%s%n", "é" * 60, "CON", "x" * 120, "=cmd()", "<b>bold", "\x1b[31mred", 'a,b"c']
HONEST = ("a-honest", "m-honest", "z-honest")


@pytest.fixture(scope="module")
def batch_of_files(place: Any, grade: Any, solved: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All of the above, handed in as a folder, between honest submissions."""
    handed = tmp_path_factory.mktemp("files")
    made = place("files")
    notebook = solved(made)
    for name in HONEST:
        (handed / f"{name}.ipynb").write_text(json.dumps(notebook), "utf-8")
    for name, (edit, _, _) in EDITED.items():
        (handed / f"{name}.ipynb").write_text(json.dumps(edit(copy.deepcopy(notebook))), "utf-8")
    for name, raw in BROKEN.items():
        (handed / f"{name}.ipynb").write_bytes(raw)
    for name, target in LINKS.items():
        text = target.replace("@ROOT@", str(made.root)).replace("@HANDED@", str(handed))
        (handed / f"{name}.ipynb").symlink_to(text)
    for name in NAMES:
        (handed / name).mkdir()
        (handed / name / "toy.ipynb").write_text(json.dumps(notebook), "utf-8")
    os.mkfifo(handed / "a_pipe.ipynb")
    (handed / "extra").mkdir()
    for name in ("toy.ipynb", "toy (1).ipynb", "other.ipynb", "course_secret.json", "gradebook.db", "sitecustomize.py"):
        (handed / "extra" / name).write_text(json.dumps(notebook) if name.endswith("ipynb") else "x", "utf-8")
    (handed / "renamed").mkdir()
    (handed / "renamed" / "my lab.ipynb").write_text(json.dumps(notebook), "utf-8")
    (handed / "missing").mkdir()
    (handed / "missing" / "readme.txt").write_text("sorry", "utf-8")
    # It has time for three of its sixty cells, and all others have as much as they need.
    grade(made, handed, limits_of=lambda student: {"check": 4.0} if student == "slow_cells" else None)
    return made


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_file_earns_what_its_own_cells_earn(batch_of_files: Any, name: str) -> None:
    _, passed, note = EDITED[name]
    result = batch_of_files.result(name)
    assert {c["grade_id"] for c in result["checks"] if c["status"] == "passed"} == passed, result["checks"]
    assert {c["grade_id"]: c["points"] for c in result["checks"]} == ALL
    assert "machinery" not in {c["status"] for c in result["checks"]}, result["checks"][0]["message"]
    assert result["status"] != "refused"
    assert batch_of_files.recorded()[name] == (sum(ALL[check] for check in passed), 0)
    assert note in " ".join(result["notes"])


@pytest.mark.parametrize("name", [*BROKEN, *LINKS, "a_pipe", "missing"])
def test_what_cannot_be_read_is_refused_with_a_reason_and_a_zero(batch_of_files: Any, name: str) -> None:
    result = batch_of_files.result(name)
    assert {c["status"] for c in result["checks"]} == {"refused"}
    assert all(c["message"] for c in result["checks"])
    assert batch_of_files.recorded()[name] == (0.0, 0)
    assert result["checks"][0]["message"] in " ".join(batch_of_files.said_by_collect.split())


@pytest.mark.parametrize("name", [*HONEST, "extra", "renamed"])
def test_honest_files_between_them_have_all_their_points(batch_of_files: Any, name: str) -> None:
    assert batch_of_files.result(name)["earned"] == 6
    assert batch_of_files.recorded()[name] == (6.0, 0)


def test_names_made_to_be_something_else_are_ids_and_have_their_points(batch_of_files: Any) -> None:
    named = set(batch_of_files.recorded()) - {
        *EDITED,
        *BROKEN,
        *LINKS,
        *HONEST,
        "a_pipe",
        "missing",
        "extra",
        "renamed",
    }
    assert len(named) == len(NAMES)
    assert {batch_of_files.recorded()[name] for name in named} == {(6.0, 0)}
    for top in ("submitted", "received", "autograded", "feedback"):
        found = {path.name for path in (batch_of_files.root / top).iterdir() if not path.name.startswith(".")}
        assert found == set(batch_of_files.recorded()), top
    for name in named:
        assert name.isascii(), name
        assert name.replace("-", "").replace("_", "").replace(".", "").isalnum(), name
        assert not name.startswith(("-", "=", "."))


def test_nothing_that_was_linked_to_has_been_copied_or_changed(batch_of_files: Any) -> None:
    assert batch_of_files.files() == batch_of_files.before
    secret = json.loads((batch_of_files.root / "course_secret.json").read_text())["secret"]
    for top in ("received", "submitted", "autograded", "feedback", "results"):
        for path in (batch_of_files.root / top).rglob("*"):
            assert not path.is_symlink()
            data = path.read_bytes() if path.is_file() else b""
            assert b"root:x:0" not in data, path
            assert secret.encode() not in data, path
            assert b"BEGIN HIDDEN" not in data or top == "autograded", path


def test_the_terminal_and_the_pages_get_no_escape_and_no_script(batch_of_files: Any) -> None:
    said = batch_of_files.said_by_collect + batch_of_files.said
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in said)
    for path in (batch_of_files.root / "feedback").rglob("*.html"):
        text = path.read_text("utf-8")
        assert "<script" not in text.lower(), path
        assert "\x1b" not in text, path
        assert path.stat().st_size < 2 << 20, (path, path.stat().st_size)


def test_the_export_for_a_spreadsheet_holds_no_formula(batch_of_files: Any, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from grader.commands.grade_cli import app

    done = CliRunner().invoke(
        app, ["export", "01", "--course", str(batch_of_files.root), "-o", str(tmp_path / "g.csv")]
    )
    assert done.exit_code == 0, done.output
    text = (tmp_path / "g.csv").read_text("utf-8")
    assert "a-honest" in text, done.output
    assert not [field for line in text.splitlines() for field in line.split(",") if field.strip('"')[:1] in "=@+\t"
                and field.strip('"')]  # fmt: skip
