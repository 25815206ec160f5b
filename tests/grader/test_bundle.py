"""The students' bundle: what is in it, and that nothing is written while there is a leak anywhere in it."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from grader.course import CourseError, course_secret, master_secret
from grader.courses.bundle import make_bundle
from grader.courses.leaks import Hidden, notebook_leaks, squeezed, text_leaks, visible_and_hidden
from grader.labs.lab import Lab, lab_from_notebook, load_lab
from tests.examples import examples

SOURCES = Path(__file__).parent / "toy_lab" / "solutions"
SLUG = "01_toy"
SOLUTION = "        self.rows = [*self.rows, x.clone()][-self.size :]"
SHORT_SOLUTION = "        self.rows = []"
HIDDEN_TEST = 'x = torch.randn(20, 4, generator=rng("check_window"))'


def inferlab(*arguments: str, ok: bool = True) -> str:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundle") / "course"
    inferlab("new-course", str(root), "--seed", "a seed that is long enough")
    inferlab("release", "01", "--course", str(root), "--sources", str(SOURCES))
    return root


@pytest.fixture
def course(released: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(released, tmp_path / "course"))


def bundle(course: Path) -> Path:
    target = course.parent / "labs.zip"
    inferlab("bundle", "-o", str(target), "--course", str(course))
    return target


Edit = Callable[[dict[str, Any]], None]


def refused(course: Path, edit: Edit) -> str:
    """Edit the released notebook; the bundle must be refused, and not be there. Returns what was said."""
    path, target = course / "labs" / SLUG / "toy.ipynb", course.parent / "leaking.zip"
    notebook = json.loads(path.read_text())
    edit(notebook)
    path.write_text(json.dumps(notebook))
    with pytest.raises(CourseError) as error:
        make_bundle(course, [SLUG], target)
    assert not target.exists()
    assert [p.name for p in course.parent.iterdir()] == ["course"]  # not even in part
    return str(error.value)


def test_the_bundle_holds_the_notebook_and_a_page_for_students_and_nothing_else(course: Path) -> None:
    with zipfile.ZipFile(bundle(course)) as archive:
        assert archive.namelist() == ["README.md", f"released/{SLUG}/toy.ipynb"]
        assert archive.read(f"released/{SLUG}/toy.ipynb") == (course / "labs" / SLUG / "toy.ipynb").read_bytes()
        readme = archive.read("README.md").decode()
        assert archive.comment == b""
        assert {(entry.extra, entry.comment) for entry in archive.infolist()} == {(b"", b"")}
    assert "inferlab lab start 01" in readme
    assert "conventions of your course" in readme


def test_the_same_course_gives_the_same_bytes(course: Path) -> None:
    first = bundle(course).read_bytes()
    assert bundle(course).read_bytes() == first


def test_nothing_released_and_unknown_labs_are_answered(tmp_path: Path) -> None:
    inferlab("new-course", str(tmp_path / "a"))
    command = ["bundle", "-o", str(tmp_path / "x.zip"), "--course", str(tmp_path / "a")]
    assert "nothing is released yet" in inferlab(*command, ok=False)
    assert "02 is not released" in inferlab(*command, "02", ok=False)
    assert not (tmp_path / "x.zip").exists()


def _cell(notebook: dict[str, Any], grade_id: str) -> dict[str, Any]:
    return next(dict_ for dict_ in notebook["cells"] if dict_["id"] == grade_id)


def _source(grade_id: str, text: str) -> Edit:
    return lambda notebook: _cell(notebook, grade_id)["source"].append("\n" + text)


def _output(text: str) -> Edit:
    stream = {"output_type": "stream", "name": "stdout", "text": [text]}
    return lambda notebook: _cell(notebook, "check_len").update(outputs=[stream])


def _metadata(text: str) -> Edit:
    return lambda notebook: _cell(notebook, "check_len")["metadata"].update(note=text)


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


WINDOW = "a line of the solution of Window"
TESTS = "a line of the hidden tests of check_window"
PLANTED: dict[str, tuple[Edit, str]] = {
    "a line of the solution in its cell": (_source("Window", SOLUTION), f"cell Window, source: {WINDOW}"),
    "a short line of the solution": (_source("Window", SHORT_SOLUTION), f"cell Window, source: {WINDOW}"),
    "a line in a text": (_source("intro", f"Try `{SOLUTION.strip()}`."), f"cell intro, source: {WINDOW}"),
    "a hidden test in a check": (_source("check_len", HIDDEN_TEST), f"cell check_len, source: {TESTS}"),
    "reformatted": (_source("intro", HIDDEN_TEST.replace('"', "'").replace(", ", ",\n    ")), TESTS),
    "in a comment": (_source("imports", f"# {SOLUTION}"), WINDOW),
    "in a string of JSON": (_source("imports", json.dumps({"code": f"if x:\n{SOLUTION}\n"})), WINDOW),
    "in an output": (_output(f"----> 3 {SOLUTION}"), "cell check_len: has outputs"),
    "any output": (_output("3"), "cell check_len: has outputs"),
    "in metadata": (_metadata(SOLUTION), WINDOW),
    "unknown metadata of a cell": (_metadata("x"), "cell check_len: has the unknown metadata note"),
    "unknown metadata of nbgrader": (
        lambda n: _cell(n, "check_len")["metadata"]["nbgrader"].update(solution_text="x"),
        "cell check_len, nbgrader: has the unknown metadata solution_text",
    ),
    "unknown metadata of the notebook": (
        lambda n: n["metadata"].update(widgets={}),
        "has the unknown metadata widgets",
    ),
    "unknown metadata of the kernel": (
        lambda n: n["metadata"]["kernelspec"].update(env={"A": "b"}),
        "metadata, kernelspec: has the unknown metadata env",
    ),
    "in the name of the kernel": (lambda n: n["metadata"]["kernelspec"].update(display_name=SOLUTION), WINDOW),
    "an unknown key of the file": (lambda n: n.update(orig_nbformat=3), "has the unknown metadata orig_nbformat"),
    "an attachment": (
        lambda n: _cell(n, "intro").update(attachments={"a.png": {"image/png": "iVBO"}}),
        "cell intro: has attachments",
    ),
    "an execution count": (lambda n: _cell(n, "check_len").update(execution_count=3), "cell check_len: was executed"),
    "a marker": (_source("intro", "### BEGIN HIDDEN TESTS"), "cell intro, source: BEGIN HIDDEN TESTS"),
    "another marker": (_source("Window", "    ### BEGIN SOLUTION"), "cell Window, source: BEGIN SOLUTION"),
    "base64": (_source("intro", b64(SOLUTION)), f"{WINDOW} (encoded)"),
    "base64 of a whole cell in a link": (
        _source("intro", f"[x](data:text/plain;base64,{b64('def f():' + chr(10) + SOLUTION)})"),
        f"{WINDOW} (encoded)",
    ),
    "base64 behind letters": (_source("intro", "abcde" + b64(SOLUTION)), f"{WINDOW} (encoded)"),
    "base64 in lines": (_source("intro", base64.encodebytes(SOLUTION.encode() * 3).decode()), f"{WINDOW} (encoded)"),
    "base64 of UTF-16": (_source("intro", base64.b64encode(SOLUTION.encode("utf-16")).decode()), f"{WINDOW} (encoded)"),
    "base64 twice": (_source("intro", b64(b64(SOLUTION))), f"{WINDOW} (encoded)"),
    "zlib": (
        _source("intro", base64.b64encode(zlib.compress(SOLUTION.encode())).decode()),
        f"{WINDOW} (encoded)",
    ),
    "gzip": (
        _source("intro", base64.urlsafe_b64encode(gzip.compress(SOLUTION.encode())).decode()),
        f"{WINDOW} (encoded)",
    ),
    "hexadecimal": (_source("intro", SOLUTION.encode().hex()), f"{WINDOW} (encoded)"),
    "a short line in base64": (_source("intro", b64(f"if x:\n{SHORT_SOLUTION}\nelse:")), f"{WINDOW} (encoded)"),
    "a cell that is not the release's": (
        lambda n: n["cells"].append({"cell_type": "markdown", "metadata": {}, "source": [SOLUTION]}),
        f"cell 9, source: {WINDOW}",
    ),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_leak_is_refused_with_its_place(course: Path, kind: str) -> None:
    edit, said = PLANTED[kind]
    assert said in refused(course, edit)


def test_a_key_that_stands_twice_hides_nothing(course: Path) -> None:
    path = course / "labs" / SLUG / "toy.ipynb"
    path.write_text(path.read_text().replace('"cells":', f'"cells": {json.dumps([SOLUTION])}, "cells":', 1))
    with pytest.raises(CourseError, match=WINDOW):
        make_bundle(course, [SLUG], course.parent / "x.zip")


@pytest.mark.parametrize("form", [bytes.hex, lambda b: bytes.hex(b).upper(), lambda b: base64.b64encode(b).decode()])
def test_secrets_are_found_in_every_form(course: Path, form: Callable[[bytes], str]) -> None:
    assert "the secret of 01_toy" in refused(course, _source("intro", form(course_secret(course, SLUG))))
    assert "the course's secret" in refused(course, _source("intro", form(master_secret(course))))


def test_the_instructors_paths_are_found(course: Path) -> None:
    assert "a path of this machine" in refused(course, _source("intro", f"see {course}/solutions"))


def test_the_solution_notebook_in_place_of_the_release_is_refused(course: Path) -> None:
    shutil.copy(course / "solutions" / SLUG / "toy.ipynb", course / "labs" / SLUG / "toy.ipynb")
    said = refused(course, lambda notebook: None)
    assert "cell Window, source: BEGIN SOLUTION" in said
    assert "cell check_calls, source: a line of the hidden tests of check_calls" in said


@pytest.mark.parametrize("name", ["toy.py", "data.csv", "sub/toy.ipynb", "other.ipynb"])
def test_another_file_beside_the_notebook_is_refused(course: Path, name: str) -> None:
    path = course / "labs" / SLUG / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    with pytest.raises(CourseError, match=f"nothing else; there is .*{path.name}"):
        make_bundle(course, [SLUG], course.parent / "x.zip")
    assert not (course.parent / "x.zip").exists()


def test_a_link_in_place_of_the_notebook_is_refused(course: Path) -> None:
    path = course / "labs" / SLUG / "toy.ipynb"
    path.unlink()
    path.symlink_to(course / "solutions" / SLUG / "toy.ipynb")
    with pytest.raises(CourseError, match="must hold the released notebook"):
        make_bundle(course, [SLUG], course.parent / "x.zip")


def test_what_is_no_notebook_is_refused(course: Path) -> None:
    path = course / "labs" / SLUG / "toy.ipynb"
    for content in (b"", b"[]", b"\xff", b'{"cells": 3}', b'{"cells": [3]}', b'{"cells": [{"metadata": 3}]}'):
        path.write_bytes(content)
        with pytest.raises(CourseError, match="is no notebook|is not UTF-8"):
            make_bundle(course, [SLUG], course.parent / "x.zip")


def test_without_the_solution_notebook_nothing_is_packed(course: Path) -> None:
    shutil.rmtree(course / "solutions" / SLUG)
    with pytest.raises(CourseError, match="what is hidden is not known"):
        make_bundle(course, [SLUG], course.parent / "x.zip")


def test_a_solution_of_another_lab_is_found_as_a_whole(course: Path) -> None:
    other = json.loads((course / "solutions" / SLUG / "toy.ipynb").read_text())
    body = "    values = sorted(items)\n    return values[len(values) // 2] if values else float('nan')  # the median"
    _cell(other, "apply_all")["source"] = f"def apply_all(items):\n    ### BEGIN SOLUTION\n{body}\n    ### END SOLUTION"
    (course / "solutions" / "02_other").mkdir()
    (course / "solutions" / "02_other" / "other.ipynb").write_text(json.dumps(other))
    assert "the hidden part of apply_all of lab 02_other" in refused(course, _source("intro", body))


def test_a_release_that_would_show_something_hidden_is_refused_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grader.courses import grading
    from grader.courses.course import nbgrader_config

    def careless(root: Path) -> Any:
        from nbgrader.converters import GenerateAssignment
        from nbgrader.preprocessors import ClearHiddenTests

        config = nbgrader_config(root)
        steps = GenerateAssignment.preprocessors.default_args[0]
        config.GenerateAssignment.preprocessors = [step for step in steps if step is not ClearHiddenTests]
        return config

    root = tmp_path / "course"
    inferlab("new-course", str(root))
    monkeypatch.setattr(grading, "nbgrader_config", careless)
    said = inferlab("release", "01", "--course", str(root), "--sources", str(SOURCES), ok=False)
    assert "lab 01_toy was not released: students must not get this: labs/01_toy/toy.ipynb, cell check_window" in said
    assert not (root / "labs" / SLUG / "toy.ipynb").exists()


def test_an_older_bundle_stays_when_a_new_one_is_refused(course: Path) -> None:
    target = bundle(course)
    before = target.read_bytes()
    path = course / "labs" / SLUG / "toy.ipynb"
    path.write_text(path.read_text().replace("A toy lab", "A toy lab ### BEGIN SOLUTION"))
    assert "labs.zip was not written" in inferlab("bundle", "-o", str(target), "--course", str(course), ok=False)
    assert target.read_bytes() == before


# Properties of the scan itself.


def _lines(lab: Lab, part: int) -> list[str]:
    return [line for cell in lab.cells for line in visible_and_hidden(cell)[part].split("\n")]


@pytest.fixture(scope="module")
def real_lab() -> tuple[Lab, Hidden]:
    from grader.study.workspace import data_root

    lab = load_lab(data_root() / "solutions" / "02_kv_cache" / "kv_cache.ipynb")
    hidden = Hidden()
    hidden.add_lab(lab)
    return lab, hidden


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_visible_lines_in_any_order_are_no_leak(real_lab: tuple[Lab, Hidden], data: st.DataObject) -> None:
    lab, hidden = real_lab
    lines = data.draw(st.lists(st.sampled_from(_lines(lab, 0)), max_size=30))
    assert text_leaks("\n".join(lines), "place", hidden, as_lines=True) == []


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_hidden_line_is_found_wherever_it_stands(real_lab: tuple[Lab, Hidden], data: st.DataObject) -> None:
    lab, hidden = real_lab
    long = sorted({line for line in _lines(lab, 1) if squeezed(line) in hidden.anywhere})
    line = data.draw(st.sampled_from(long))
    prose = st.text("abc \n(){}:,", max_size=40)
    text = data.draw(prose) + " " * data.draw(st.integers(0, 8)) + line + data.draw(prose)
    encode = data.draw(st.sampled_from([str, json.dumps, repr, b64, lambda t: "x " + t.encode().hex()]))
    assert text_leaks(encode(text), "place", hidden) != []


def test_the_released_labs_of_the_repository_have_no_leak() -> None:
    from grader.study.workspace import data_root

    for path in sorted((data_root() / "labs").glob("[0-9]*_*/*.ipynb")):
        hidden = Hidden()
        hidden.add_lab(load_lab(data_root() / "solutions" / path.parent.name / path.name))
        assert len(hidden.anywhere) > 40  # lines of the solution, and of what its checks keep hidden
        assert notebook_leaks(path.read_text("utf-8"), path.name, hidden) == []


def test_a_line_that_is_visible_too_is_no_leak_and_one_that_is_not_is(solution_text: str) -> None:
    lab = lab_from_notebook(json.loads(solution_text), "01_toy", "toy")
    hidden = Hidden()
    hidden.add_lab(lab)
    assert text_leaks("    w = Window(2)\n  model = Model()", "p", hidden, as_lines=True) == []
    assert text_leaks("self.size = size", "p", hidden, as_lines=True) != []
    assert text_leaks("the size: self.size = size, says the text", "p", hidden, as_lines=True) == []  # short: as a line


def test_the_bundle_can_be_read_by_others_once_unpacked(course: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(bundle(course)) as archive:
        assert {stat.S_IMODE(entry.external_attr >> 16) for entry in archive.infolist()} == {0o644}
