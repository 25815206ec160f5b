"""A course folder and its secret; a private course from the seed to a graded class of three, by the commands."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grader.course import SECRET_FILE, CourseError, course_secret, is_private, new_course
from grader.labs.lab import load_lab
from grader.study.workspace import data_root

SEED = "four words nobody guesses"


def inferlab(*arguments: str, ok: bool = True) -> str:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return " ".join(done.output.split())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files_of(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_the_same_seed_gives_the_same_course_byte_for_byte(tmp_path: Path) -> None:
    new_course(tmp_path / "a", SEED)
    new_course(tmp_path / "b", f" {SEED}\n")
    new_course(tmp_path / "c", SEED + ".")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert course_secret(tmp_path / "a", "02_kv_cache") != course_secret(tmp_path / "c", "02_kv_cache")


def test_without_a_seed_the_secret_is_random_and_the_labs_are_public(tmp_path: Path) -> None:
    new_course(tmp_path / "a")
    new_course(tmp_path / "b")
    assert course_secret(tmp_path / "a", "x") != course_secret(tmp_path / "b", "x")
    assert not is_private(tmp_path / "a")
    assert "public labs" in (tmp_path / "a" / "README.md").read_text()


def test_secrets_of_two_purposes_have_nothing_in_common(tmp_path: Path) -> None:
    new_course(tmp_path / "a", SEED)
    made = [course_secret(tmp_path / "a", name) for name in ("01_x", "02_x", "pseudonyms")]
    assert len(set(made)) == 3
    assert {len(secret) for secret in made} == {32}
    assert made == [course_secret(tmp_path / "a", name) for name in ("01_x", "02_x", "pseudonyms")]


def test_only_the_owner_can_read_secret_solutions_and_submissions(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        new_course(tmp_path / "a", SEED)
    finally:
        os.umask(before)
    root = tmp_path / "a"
    assert mode(root / SECRET_FILE) == 0o600
    assert [mode(p) for p in (root, *(root / n for n in ("solutions", "received", "submitted", "results")))] == [
        0o700
    ] * 5
    ignored = (root / ".gitignore").read_text().split()
    assert {SECRET_FILE, "solutions/", "submitted/", "received/", "results/"} <= set(ignored)
    assert SEED not in b"".join(files_of(root).values()).decode()


def test_a_secret_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    new_course(tmp_path / "a", SEED)
    (tmp_path / "a" / SECRET_FILE).chmod(0o644)
    with pytest.raises(CourseError, match="chmod 600"):
        course_secret(tmp_path / "a", "02_kv_cache")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"private": true, "secret": "00"}', '{"private": 1, "secret": "%s"}' % ("0" * 64)]
)
def test_a_damaged_secret_is_named_and_never_replaced(tmp_path: Path, text: str) -> None:
    new_course(tmp_path / "a", SEED)
    path = tmp_path / "a" / SECRET_FILE
    path.write_text(text)
    with pytest.raises(CourseError, match="cannot be read; put it back"):
        is_private(tmp_path / "a")
    path.unlink()
    with pytest.raises(CourseError, match="is missing; put it back"):
        is_private(tmp_path / "a")
    assert not path.exists()


def test_an_empty_seed_and_a_second_course_in_a_folder_are_refused(tmp_path: Path) -> None:
    short = inferlab("new-course", str(tmp_path / "a"), "--seed", "x", ok=False)
    assert "the seed has 1 characters, and at least 12 are needed" in short
    assert not (tmp_path / "a" / "course_secret.json").exists()
    assert "the seed is empty" in inferlab("new-course", str(tmp_path / "a"), "--seed", " ", ok=False)
    assert not (tmp_path / "a").exists()
    inferlab("new-course", str(tmp_path / "a"), "--seed", SEED)
    before = files_of(tmp_path / "a")
    assert "is a course already" in inferlab(
        "new-course", str(tmp_path / "a"), "--seed", "another one that is long", ok=False
    )
    (tmp_path / "a" / "nbgrader_config.py").unlink()
    assert "is a course already" in inferlab("new-course", str(tmp_path / "a"), ok=False)
    assert (tmp_path / "a" / SECRET_FILE).read_bytes() == before[SECRET_FILE]


def test_releasing_from_an_installed_package_says_that_a_checkout_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inferlab("new-course", str(tmp_path / "a"))
    monkeypatch.setattr("grader.study.workspace.data_root", lambda: tmp_path / "inferlab_data")
    said = inferlab("release", "02", "--course", str(tmp_path / "a"), ok=False)
    assert "holds no solutions, on purpose: clone the course's repository" in said
    assert "--sources" in said


def test_a_lab_that_does_not_exist_is_answered_with_those_that_do(tmp_path: Path) -> None:
    inferlab("new-course", str(tmp_path / "a"))
    assert "02_kv_cache" in inferlab("release", "77", "--course", str(tmp_path / "a"), ok=False)


# A private course of lab 02: one student hands in the public solution, one what the course asks for, one nothing.


def solved(released: Path, solution: Path) -> dict[str, Any]:
    """The released notebook with the solution cells of a solution notebook, less their markers."""
    cells = {cell["id"]: cell["source"] for cell in json.loads(solution.read_text())["cells"]}
    notebook: dict[str, Any] = json.loads(released.read_text())
    for cell in notebook["cells"]:
        if cell["metadata"]["nbgrader"]["solution"]:
            cell["source"] = [line for line in cells[cell["id"]] if "### " not in line]
    return notebook


PUBLIC = data_root() / "solutions" / "02_kv_cache" / "kv_cache.ipynb"


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("private") / "course"
    inferlab("new-course", str(root), "--seed", SEED)
    assert "conventions.md" in inferlab("release", "02", "--course", str(root))
    return root


@pytest.mark.timeout(1800)
def test_in_a_private_course_the_public_solution_loses_points_and_the_private_reference_none(
    course: Path, tmp_path: Path
) -> None:
    released = course / "labs" / "02_kv_cache" / "kv_cache.ipynb"
    private = course / "solutions" / "02_kv_cache" / "kv_cache.ipynb"
    handed = {
        "copied": solved(released, PUBLIC),
        "whole-public-notebook": json.loads(PUBLIC.read_text()),
        "right": solved(released, private),
        "nothing": json.loads(released.read_text()),
    }
    for student, notebook in handed.items():
        path = tmp_path / "handed" / student / "kv_cache.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(notebook))
    inferlab("collect", "02", str(tmp_path / "handed"), "--course", str(course))
    inferlab("run", "02", "--insecure", "--workers", "1", "--course", str(course))
    results = {s: json.loads((course / "results" / "02_kv_cache" / f"{s}.json").read_text()) for s in handed}
    assert (results["right"]["earned"], results["right"]["status"]) == (20, "passed")
    assert results["nothing"]["earned"] == 0
    for student in ("copied", "whole-public-notebook"):
        lost = {check["grade_id"] for check in results[student]["checks"] if check["status"] != "passed"}
        assert {"check_append", "check_batch_rows", "check_batch_writes"} <= lost
        assert results[student]["earned"] <= 15


def test_conventions_md_says_what_was_drawn_and_the_notebook_says_it_to_students(course: Path) -> None:
    from grader.courses.drawn import drawn
    from grader.labs.convention import load_conventions

    source = data_root() / "solutions" / "02_kv_cache" / "kv_cache.py"
    options, listed = drawn(course, source), (course / "conventions.md").read_text()
    assert len(options) == len(load_conventions(source)) == 5
    assert all(option.says in listed for option in options)
    texts = {
        c["id"]: "".join(c["source"])
        for c in json.loads((course / "labs/02_kv_cache/kv_cache.ipynb").read_text())["cells"]
    }
    public = {c["id"]: "".join(c["source"]) for c in json.loads(PUBLIC.read_text())["cells"]}
    changed = {grade_id for option in options for grade_id in option.cells if grade_id.startswith("text_")}
    assert changed
    assert all(texts[grade_id] != public[grade_id] for grade_id in changed)


def test_the_solution_is_in_a_folder_that_only_its_owner_can_enter(course: Path) -> None:
    assert mode(course / "solutions") == 0o700
    assert (course / "solutions" / "02_kv_cache" / "kv_cache.ipynb").read_bytes() != PUBLIC.read_bytes()


def test_a_course_without_a_seed_releases_the_public_notebook(tmp_path: Path) -> None:
    inferlab("new-course", str(tmp_path / "a"))
    assert "conventions" not in inferlab("release", "02", "--course", str(tmp_path / "a"))
    made = (tmp_path / "a" / "solutions" / "02_kv_cache" / "kv_cache.ipynb").read_bytes()
    assert made == PUBLIC.read_bytes()
    assert not (tmp_path / "a" / "conventions.md").exists()


@pytest.mark.timeout(1800)
def test_a_student_with_the_bundle_checks_against_the_private_release(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_launcher: None
) -> None:
    from grader.commands.lab_cli import app

    def lab_command(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, " ".join(done.output.split())

    inferlab("bundle", "02", "-o", str(tmp_path / "labs.zip"), "--course", str(course))
    home = tmp_path / "home"
    with zipfile.ZipFile(tmp_path / "labs.zip") as archive:
        archive.extractall(home)
    monkeypatch.setenv("INFERLAB_HOME", str(home))
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    assert lab_command("start", "02")[0] == 0
    mine = home / "labs" / "02_kv_cache" / "kv_cache.ipynb"
    assert mine.read_bytes() == (course / "labs" / "02_kv_cache" / "kv_cache.ipynb").read_bytes()
    assert not (home / "labs" / "01_prefill_decode").exists()  # a public lab would be checked against nothing

    mine.write_text(json.dumps(solved(mine, course / "solutions" / "02_kv_cache" / "kv_cache.ipynb")))
    code, said = lab_command("check", "02")
    assert code == 0, said
    assert "Hand it in the way your instructor says" in said
    assert "with your instructor" in lab_command("diff", "02")[1]
    edited = mine.read_bytes()
    assert lab_command("start", "02")[0] == 0
    assert mine.read_bytes() == edited

    mine.write_text(json.dumps(solved(mine, PUBLIC)))
    code, said = lab_command("check", "02")
    assert code == 1
    for drawn in ("model(tokens, positions)", "view() gives one tensor", "attend gives a batch axis in front"):
        assert drawn in said, drawn


def test_visible_checks_run_in_a_notebook_as_they_are(course: Path) -> None:
    """What a student without our commands does: run the cells from top to bottom."""
    notebook = solved(
        course / "labs" / "02_kv_cache" / "kv_cache.ipynb", course / "solutions" / "02_kv_cache" / "kv_cache.ipynb"
    )
    namespace: dict[str, Any] = {}
    for cell in notebook["cells"]:
        metadata = cell["metadata"]
        if cell["cell_type"] == "code" and metadata.get("inferlab", {}).get("where") != "notebook":
            exec("".join(cell["source"]), namespace)
    assert namespace["check_served"]


def test_a_private_notebook_that_meets_the_public_release_is_noticed(course: Path) -> None:
    from grader.notebook import other_checks

    private, public = (load_lab(folder / "labs/02_kv_cache/kv_cache.ipynb") for folder in (course, data_root()))
    history = [cell.source for cell in private.cells if cell.kind != "text"]
    assert other_checks(private, history) == 0
    changed = {c.source for c in private.of_kind("check")} - {c.source for c in public.of_kind("check")}
    assert other_checks(public, [*history, *history]) == len(changed) >= 3
