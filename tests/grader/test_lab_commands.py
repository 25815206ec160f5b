"""A learner's commands on a workspace of their own: start, check, reset, diff, and grader.check() in a notebook."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from grader.labs.lab import load_lab
from grader.results.result import CheckResult, Result
from grader.study import workspace
from grader.study.lab_log import read_checks
from grader.study.show import show_result

RIGHT = {
    "Window": """
class Window:
    def __init__(self, size):
        self.size, self.rows = size, []
    def append(self, x):
        self.rows = [*self.rows, x][-self.size :]
    def mean(self):
        return torch.stack(self.rows).mean(0)
    def __len__(self):
        return len(self.rows)
""",
    "apply_all": "def apply_all(m, t, w):\n    for x in t:\n        w.append(m(x[None]))\n    return w.mean()",
}


@pytest.fixture
def notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release_text: str, solution_text: str, warm_launcher: None
) -> Path:
    """Where the learner's notebook of the toy lab will be. A check in a kernel has a launcher of its own, as usual."""
    for top, text in (("labs", release_text), ("solutions", solution_text)):
        path = tmp_path / "root" / top / "01_toy" / "toy.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setattr(workspace, "data_root", lambda: tmp_path / "root")
    monkeypatch.setattr(workspace, "chapters_root", lambda: tmp_path / "root" / "chapters")
    monkeypatch.setenv("INFERLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    return tmp_path / "home" / "labs" / "01_toy" / "toy.ipynb"


def lab(*arguments: str, ok: bool = True) -> str:
    from grader.commands.lab_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return " ".join(done.output.split())


def write(path: Path, answers: dict[str, str]) -> None:
    notebook: dict[str, Any] = json.loads(path.read_text())
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell["id"], cell["source"])
    path.write_text(json.dumps(notebook))


def test_start_brings_the_lab_and_never_overwrites_edits(notebook: Path) -> None:
    assert str(notebook) in lab("start", "01")
    assert "with your work in it" not in lab("start", "01")
    write(notebook, RIGHT)
    before = notebook.read_text()
    assert "with your work in it" in lab("start", "1")
    assert notebook.read_text() == before


def test_an_unknown_lab_is_refused_with_the_labs_that_exist(notebook: Path) -> None:
    assert "01_toy" in lab("start", "77", ok=False)
    assert "lab start 01" in lab("check", "01", ok=False)


def test_check_says_what_to_do_next_and_fails_until_all_passes(notebook: Path) -> None:
    lab("start", "01")
    said = lab("check", "01", ok=False)
    assert "0 of 6 points" in said
    assert "Not written yet, 3 of 3 checks: check_window" in said
    write(notebook, {**RIGHT, "Window": RIGHT["Window"].replace("[-self.size :]", "")})
    said = lab("check", "01", ok=False)
    assert "start with check_window" in said
    assert "For a hint: inferlab lab hint 01 check_window" in said
    assert "what happens to the first vector" not in said
    write(notebook, RIGHT)
    said = lab("check", "01")
    assert "All checks passed" in said
    assert "inferlab progress" in said
    kept, damaged = read_checks()
    assert [(check.points, check.first) for check in kept["01_toy"]] == [
        (6, "check_window"),
        (6, "check_window"),
        (6, ""),
    ]
    assert (kept["01_toy"][0].earned, kept["01_toy"][2].earned) == (0, 6)
    assert damaged == 0


def test_a_notebook_that_was_only_run_has_no_work_in_it(notebook: Path) -> None:
    workspace.prepare()  # what `inferlab learn` does
    raw = json.loads(notebook.read_text())
    for cell in raw["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [{"output_type": "stream", "name": "stdout", "text": "x"}], 3
    notebook.write_text(json.dumps(raw))
    assert "with your work in it" not in lab("start", "01")


@pytest.mark.parametrize("in_notebook", [False, True])
def test_what_failed_shows_no_hint_unasked_and_what_is_unwritten_shares_a_line(in_notebook: bool) -> None:
    checks = [
        CheckResult("check_a", 1, 1, "passed", "A holds", seen="a is 1"),
        CheckResult("check_b", 1, 0, "failed", "B holds", message="b is 2", hint="look at b", seen="b: 2"),
        *(
            CheckResult(f"check_{name}", 1, 0, "not written", f"{name} holds", f"{name} is not written yet", "hint")
            for name in "cdef"
        ),
    ]
    said = shown(Result("01_toy", 6, checks=checks), in_notebook)
    for text in (
        "B holds",
        "b: 2",
        "b is 2",
        "For a hint: ",
        "1 of 6 checks: check_a",
        "4 of 6 checks: check_c, check_d",
    ):
        assert text in said
    for text in ("A holds", "a is 1", "look at b", "c holds", "c is not written"):
        assert text not in said
    assert (
        said.index("b is 2") < said.index("Passed, 1") < said.index("check_f") < said.index("Next: start with check_b")
    )
    assert said.rstrip().endswith("01_toy: 1 of 6 points")


@pytest.mark.parametrize("in_notebook", [False, True])
def test_of_an_untouched_lab_only_names_and_the_next_step_are_shown(in_notebook: bool) -> None:
    checks = [CheckResult(f"check_{n}", 1, 0, "not written", "holds", hint="hint") for n in range(15)]
    said = shown(Result("01_toy", 15, checks=checks), in_notebook)
    assert "0 of 15 points" in said
    assert said.count("\n") <= 8
    assert "Next: write what check_0 asks for" in said


def test_a_full_pass_is_a_few_lines_whatever_the_checks_saw() -> None:
    checks = [CheckResult(f"check_{n}", 1, 1, "passed", "it holds", seen="a line\n" * 30) for n in range(20)]
    said = shown(Result("01_toy", 20, checks=checks))
    assert said.count("\n") <= 10
    assert "check_19" in said
    assert said.rstrip().endswith("20 of 20 points")


def test_where_all_passed_the_score_stands_below_what_the_engine_served() -> None:
    result = Result("01_toy", 1, checks=[CheckResult("check_a", 1, 1, "passed", "")])
    console = Console(file=io.StringIO(), width=80)
    show_result(console, result, "01", served="a text that was served")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines.index("a text that was served") < lines.index("01_toy: 1 of 1 points") == len(lines) - 1


def test_that_a_check_is_running_is_no_part_of_what_the_check_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The console of the commands has no file of its own: it asks for sys.stdout at each line."""
    from grader.labs.lab import Cell
    from grader.study import show

    monkeypatch.setattr(show, "SILENT_SECONDS", 0.0)
    said, end = "", time.monotonic() + 600
    with show.telling(Console(width=80)) as on_start, contextlib.redirect_stdout(io.StringIO()) as report:
        on_start(Cell("check_slow", "check", ""))
        while "check_slow is running" not in said + report.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
            said += capsys.readouterr().out
    assert "check_slow is running" in said
    assert report.getvalue() == ""


def shown(result: Result, in_notebook: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80)
    show_result(console, result, "01", in_notebook)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_check_of_another_file_is_not_kept_as_this_learners_progress(notebook: Path, tmp_path: Path) -> None:
    lab("start", "01")
    other = tmp_path / "other.ipynb"
    other.write_text(notebook.read_text())
    assert "0 of 6 points" in lab("check", "01", "--file", str(other), ok=False)
    assert read_checks() == ({}, 0)


def test_a_notebook_of_another_lab_is_not_checked_as_this_one(notebook: Path, tmp_path: Path) -> None:
    lab("start", "01")
    folder = tmp_path / "root" / "labs" / "02_other"
    folder.mkdir()
    other = json.loads(notebook.read_text())
    for cell in other["cells"]:
        cell["id"] = f"other-{cell['id']}"
        if "nbgrader" in cell["metadata"]:
            cell["metadata"]["nbgrader"]["grade_id"] = cell["id"]
    (folder / "other.ipynb").write_text(json.dumps(other))
    said = lab("check", "01", "--file", str(folder / "other.ipynb"), ok=False)
    assert "is a notebook of lab 02_other; expected one of lab 01_toy" in said
    assert f"inferlab lab check 02 --file {folder / 'other.ipynb'}" in said
    assert "was put back" not in said


def test_where_the_solutions_are_not_at_hand_the_learner_is_told_where_they_are(notebook: Path, tmp_path: Path) -> None:
    from grader.study.lab_work import next_step

    passed = Result("01_toy", 6, checks=[CheckResult("check_window", 6, 6, "passed", "")])
    assert "lab diff 01" in next_step(passed, "01")
    shutil.rmtree(tmp_path / "root" / "solutions")
    said = next_step(passed, "01")
    assert "solutions/01_toy of the course's repository" in said
    assert "lab diff" not in said


def test_the_first_cell_of_another_version_is_not_a_cell_of_the_learner(notebook: Path) -> None:
    from grader.bootstrap import bootstrap_source
    from grader.notebook import submission_from_history

    lab("start", "01")
    assert submission_from_history(load_lab(notebook), [bootstrap_source("an-older-place")]).added == []


DAMAGED = {
    "empty": "",
    "truncated": '{"cells": [{"cell_type": "code", "source": ["x',
    "of nothing": "\0\0\0",
    "a list": "[]",
    "without cells": '{"nbformat": 4}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_of_a_damaged_notebook_nothing_is_lost_and_a_command_gives_a_new_one(notebook: Path, text: str) -> None:
    lab("start", "01")
    fresh = notebook.read_bytes()
    notebook.write_text(text)
    for command in (["check", "01"], ["reset", "01", "Window"], ["reset", "01", "--repair"], ["diff", "01"]):
        said = lab(*command, ok=False)
        assert "toy.ipynb cannot be read" in said
        assert "inferlab lab reset 01 --all" in said
    assert notebook.read_text() == text
    assert "kept in" in (said := lab("reset", "01", "--all"))
    assert "toy.kept.ipynb" in said
    assert notebook.read_bytes() == fresh
    assert notebook.with_name("toy.kept.ipynb").read_text() == text
    assert "0 of 6 points" in lab("check", "01", ok=False)


def test_the_whole_notebook_is_put_back_and_each_kept_file_has_its_name(notebook: Path) -> None:
    lab("start", "01")
    fresh = notebook.read_bytes()
    for answers, name in ((RIGHT, "toy.kept.ipynb"), ({"Window": "mine"}, "toy.kept2.ipynb")):
        write(notebook, answers)
        written = notebook.read_bytes()
        assert name in lab("reset", "01", "--all")
        assert notebook.with_name(name).read_bytes() == written
        assert notebook.read_bytes() == fresh


def test_cells_and_metadata_that_are_gone_come_back_and_the_code_stays(notebook: Path) -> None:
    lab("start", "01")
    write(notebook, RIGHT)
    raw = json.loads(notebook.read_text())
    raw["cells"] = [cell for cell in raw["cells"] if cell["id"] in ("Window", "apply_all", "check_len")]
    for cell in raw["cells"]:
        cell["metadata"] = {}
    notebook.write_text(json.dumps(raw))
    said = lab("check", "01")  # a check needs no repair: what is missing is taken from the release
    assert "6 of 6 points" in said
    assert "inferlab lab reset 01 --repair" in said
    said = lab("reset", "01", "--repair")
    assert "cell check_window is missing: it was put back" in said
    assert "toy.kept.ipynb" in said
    cells = {cell["id"]: cell for cell in json.loads(notebook.read_text())["cells"]}
    assert list(cells) == [cell.grade_id for cell in load_lab(notebook).cells]
    assert "".join(cells["Window"]["source"]) == RIGHT["Window"]


def test_a_cell_that_was_deleted_comes_back_in_its_place(notebook: Path) -> None:
    lab("start", "01")
    ids = [cell["id"] for cell in json.loads(notebook.read_text())["cells"]]
    raw = json.loads(notebook.read_text())
    raw["cells"] = [cell for cell in raw["cells"] if cell["id"] != "Window"]
    notebook.write_text(json.dumps(raw))
    assert "not there any more" in lab("reset", "01", "Window")
    assert [cell["id"] for cell in json.loads(notebook.read_text())["cells"]] == ids


def test_reset_without_a_cell_says_which_there_are(notebook: Path) -> None:
    lab("start", "01")
    for command in (["reset", "01"], ["reset", "01", "Window", "--all"]):
        assert "Window, apply_all" in lab(*command, ok=False)


def test_reset_restores_one_stub_and_keeps_what_was_written(notebook: Path) -> None:
    lab("start", "01")
    write(notebook, RIGHT)
    lab("reset", "01", "Window")
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]}
    assert "NotImplementedError" in cells["Window"]
    assert cells["apply_all"] == RIGHT["apply_all"]
    assert (notebook.parent / "Window.kept1.py").read_text() == RIGHT["Window"]
    assert "Window, apply_all" in lab("reset", "01", "check_len", ok=False)


def test_what_does_not_return_is_named_with_its_line_and_called_once(
    notebook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grader.learner_side.peer import Peer

    lab("start", "01")
    body = "\n        while self.size:\n            x = x"
    write(notebook, {**RIGHT, "Window": RIGHT["Window"].replace("def append(self, x):", f"def append(self, x):{body}")})
    request, calls = Peer.request, []

    def hurried(peer: Any, header: dict[str, Any], payload: Any) -> Any:
        if header.get("n") == "append":
            calls.append(header)
            peer.call_seconds = 0.2
        return request(peer, header, payload)

    monkeypatch.setattr(Peer, "request", hurried)
    monkeypatch.setattr("grader.commands.lab_cli.console", Console(width=300))
    said = lab("check", "01", ok=False)
    assert "append (cell Window) had not finished after 10 s; it was at line" in said
    assert "while self.size:" in said or "x = x" in said
    assert "it needs Window, which did not return before" in said
    assert said.count("had not finished") == said.count("did not return before") == 1
    assert len(calls) == 1


def test_while_a_check_runs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from grader.labs.lab import Cell
    from grader.study import show

    monkeypatch.setattr(show, "SILENT_SECONDS", 0.0)
    console = Console(file=io.StringIO(), width=80)
    assert isinstance(console.file, io.StringIO)
    with show.telling(console) as on_start:
        on_start(Cell("check_slow", "check", ""))
        end = time.monotonic() + 600
        while "check_slow is running" not in console.file.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert console.file.getvalue().count("check_slow is running") == 1


def test_diff_opens_only_after_full_marks(notebook: Path) -> None:
    lab("start", "01")
    assert "opens when all checks pass" in lab("diff", "01", ok=False)
    write(notebook, RIGHT)
    said = lab("diff", "01")
    assert "+++ yours/Window" in said
    assert "BEGIN SOLUTION" not in said


def test_check_in_a_notebook_gives_the_result_of_lab_check(notebook: Path) -> None:
    from grader.notebook import submission_from_history, which_lab
    from grader.study import lab_work

    lab("start", "01")
    released = load_lab(notebook)
    checks = [cell.source for cell in released.cells if cell.kind in ("check", "code")]
    history = ["import grader", *checks, "1 / 0", "half = 0.5", RIGHT["Window"].replace("size", "half")]
    history += [
        RIGHT["apply_all"],
        "def helper():\n    return 1",
        "def helper():\n    return 2",
        RIGHT["Window"],
        "grader.check()",
    ]
    assert which_lab([released], history) is released
    submission = submission_from_history(released, history)
    assert submission.answers == RIGHT
    assert [a.source for a in submission.added] == [
        "import grader",
        "1 / 0",
        "half = 0.5",
        "def helper():\n    return 2",
    ]
    assert lab_work.check_submission(released, submission).status == "passed"


def test_check_runs_inside_a_kernel(notebook: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    lab("start", "01")
    write(notebook, RIGHT)
    made = nbformat.read(notebook, as_version=4)
    patch = (
        "from pathlib import Path\nfrom grader.study import workspace\n"
        f"workspace.data_root = lambda: Path({str(tmp_path / 'root')!r})\nimport grader\ngrader.check()"
    )
    made.cells.append(nbformat.v4.new_code_cell(patch))
    NotebookClient(made, timeout=600).execute()
    outputs = made.cells[-1].outputs
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "6 of 6 points" in text
    assert (tmp_path / "data" / "lab_checks.jsonl").exists()
