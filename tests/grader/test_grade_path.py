"""The path of a grade in a real course folder: release, collect, run, feedback, report, by the commands."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

RIGHT = """
class Window:
    def __init__(self, size):
        self.size, self.rows = size, []

    def append(self, x):
        import warnings

        warnings.warn("harmless")
        self.rows = [*self.rows, x][-self.size :]

    def mean(self):
        return torch.stack(self.rows).mean(0)

    def __len__(self):
        return len(self.rows)
"""
APPLY = """
def apply_all(model, tokens, window):
    for i in range(len(tokens)):
        window.append(model(tokens[i : i + 1]))
    return window.mean()
"""

# student -> (solution cells, points, status)
CLASS: dict[str, tuple[dict[str, str], float, str]] = {
    "right": ({"Window": RIGHT, "apply_all": APPLY}, 6, "passed"),
    "partly": ({"Window": RIGHT.replace("[-self.size :]", ""), "apply_all": APPLY}, 3, "failed"),
    "wrong": (
        {"Window": "class Window:\n    pass", "apply_all": "def apply_all(*_): return '<script>alert(1)</script>'"},
        0,
        "failed",
    ),
    "nothing": ({}, 0, "failed"),
    "crashing": (
        {"Window": RIGHT.replace("return len(self.rows)", "import os; os._exit(0)"), "apply_all": APPLY},
        5,
        "crashed in check_len",
    ),
    "never-ends": (
        {"Window": RIGHT.replace("return len(self.rows)", "while True: pass"), "apply_all": APPLY},
        5,
        "timed out in check_len",
    ),
    "never-starts": ({"Window": RIGHT + "\nwhile True: pass", "apply_all": APPLY}, 0, "timed out in check_window"),
}
REFUSED = {"not-a-notebook": b"hello", "empty": b"", "not-utf8": b"\xff\xfe{"}


def inferlab(*arguments: str, ok: bool = True) -> str:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return " ".join(done.output.split())


def run(root: Path, ok: bool = True) -> str:
    return inferlab("run", "01", "--insecure", "--workers", "1", "--course", str(root), ok=ok)


def submission(release: Path, answers: dict[str, str]) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(release.read_text())
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell["id"], cell["source"])
    return notebook


# What never ends has little time, and all others as much as they need: see `grader.learner_side.wire.Allowance` for why
# a busy machine changes nothing for either.
HANGING = {"call": 2.0}


@pytest.fixture(scope="module")
def graded_course(
    tmp_path_factory: pytest.TempPathFactory, released_course: Callable[[Path], Path], warm_examiners: None
) -> Path:
    """A course in which eleven submissions were collected and graded. Do not change it."""
    from grader.courses import batch

    folder = tmp_path_factory.mktemp("course")
    root, handed = released_course(folder / "course"), folder / "handed"
    release = root / "labs" / "01_toy" / "toy.ipynb"
    for student, (answers, _, _) in CLASS.items():
        path = handed / student / "toy.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(submission(release, answers)))
    for student, raw in REFUSED.items():
        (handed / f"{student}.ipynb").write_bytes(raw)
    (handed / "link.ipynb").symlink_to(root / "solutions" / "01_toy" / "toy.ipynb")
    said = inferlab("collect", "01", str(handed), "--course", str(root))
    assert "11 submissions taken in, 4 of them refused" in said
    examine = batch.grade_submission
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            batch,
            "grade_submission",
            lambda job: examine(replace(job, limits=HANGING if job.student.startswith("never") else {})),
        )
        said = run(root)
    assert "11 graded, 0 unchanged" in said
    return root


@pytest.fixture
def course(graded_course: Path, tmp_path: Path) -> Path:
    """A copy of that course, for a test that changes something."""
    return Path(shutil.copytree(graded_course, tmp_path / "course"))


def results(root: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (root / "results" / "01_toy").glob("*.json")}


def gradebook(root: Path) -> dict[str, Any]:
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{root}/gradebook.db") as book:
        return {s.student.id: (s.score, s.needs_manual_grade) for s in book.find_assignment("01_toy").submissions}


@pytest.mark.parametrize("student", CLASS)
def test_each_submission_has_its_score_and_status_whatever_the_others_do(graded_course: Path, student: str) -> None:
    _, points, status = CLASS[student]
    result = results(graded_course)[student]
    assert (result["earned"], result["points"], result["status"]) == (points, 6, status)
    assert gradebook(graded_course)[student] == (points, False)


@pytest.mark.parametrize("student", [*REFUSED, "link"])
def test_what_cannot_be_read_has_a_recorded_reason_and_zero_points(graded_course: Path, student: str) -> None:
    result = results(graded_course)[student]
    assert (result["earned"], result["status"]) == (0, "refused")
    assert len(result["checks"][0]["message"]) > 10
    assert gradebook(graded_course)[student] == (0, False)


def test_the_release_holds_one_file_and_nothing_of_the_solution(graded_course: Path) -> None:
    files = [path.name for path in (graded_course / "labs" / "01_toy").iterdir()]
    assert files == ["toy.ipynb"]
    assert "x.clone" not in (graded_course / "labs" / "01_toy" / "toy.ipynb").read_text()


def test_a_second_run_grades_only_what_changed(course: Path, tmp_path: Path) -> None:
    assert "0 graded, 11 unchanged" in run(course)
    notebook = submission(course / "labs" / "01_toy" / "toy.ipynb", CLASS["right"][0])
    with zipfile.ZipFile(tmp_path / "handed.zip", "w") as archive:
        archive.writestr("handed/nothing/toy.ipynb", json.dumps(notebook))
        archive.writestr("handed/late/toy.ipynb", json.dumps(notebook))
        archive.writestr("handed/../../evil/toy.ipynb", json.dumps(notebook))
    said = inferlab("collect", "01", str(tmp_path / "handed.zip"), "--course", str(course))
    assert "outside its folder" in said
    said = run(course)
    assert "nothing: 6 of 6, passed" in said
    assert "late: 6 of 6, passed" in said
    assert "3 graded" in said


def test_feedback_shows_property_message_and_hint_and_no_hidden_test(course: Path) -> None:
    inferlab("feedback", "01", "--course", str(course))
    page = (course / "feedback" / "partly" / "01_toy" / "toy.html").read_text()
    assert "the mean is over the last `size` vectors only." in page
    assert "expected a mean of 3" in page
    assert "what happens to the first vector" in page
    assert "3 of 6 points" in page
    assert 'name="viewport"' in page
    for hidden in ("HIDDEN", "torch.randn", "rng(", "reference.", "x.clone()"):
        assert hidden not in page


def test_feedback_runs_no_script_of_a_learner(course: Path) -> None:
    inferlab("feedback", "01", "--course", str(course))
    page = (course / "feedback" / "wrong" / "01_toy" / "toy.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_the_report_shows_every_student_and_check(graded_course: Path) -> None:
    said = inferlab("report", "01", "--course", str(graded_course))
    for word in (*CLASS, "check_window", "check_len"):
        assert word[:8] in said


def test_a_failure_of_the_grader_is_a_zero_that_waits_for_a_person_and_is_tried_again(
    course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grader.examination import worker

    def fail(*_: Any) -> Any:
        return {}, "the course's file is gone"

    (course / "results" / "01_toy" / "right.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_try", fail)
        said = run(course, ok=False)
    assert "1 could not be graded" in said
    assert results(course)["right"]["status"] == "machinery"
    assert "the course's file is gone" in results(course)["right"]["checks"][0]["message"]
    assert gradebook(course)["right"] == (0, True)
    said = run(course)
    assert "right: 6 of 6, passed" in said
    assert gradebook(course)["right"] == (6, False)


def test_a_disk_that_fills_up_while_submissions_are_examined_stops_the_run_and_gives_nobody_zero(
    course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grader.courses import batch
    from grader.examination import worker

    def fail(*_: Any) -> Any:
        return {}, str(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/there"))

    def unreadable(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = gradebook(course)
    (course / "results" / "01_toy" / "right.json").unlink()
    for module, name, fault in ((worker, "_try", fail), (batch, "job_of", unreadable)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fault)
            said = run(course, ok=False)
        assert "the disk is full" in said
        assert " of 6" not in said
        assert "right" not in results(course)
        assert gradebook(course) == before
