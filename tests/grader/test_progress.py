"""`inferlab progress` on a small course of one finished and one planned chapter, in folders of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from grader.commands.progress_cli import show
from grader.results.result import CheckResult, Result
from grader.study import lab_log, workspace
from grader.study.manifest import Course, load_course
from grader.study.progress import (
    ChapterProgress,
    LabProgress,
    PartProgress,
    Progress,
    executed_cells,
    measure,
    nearness,
    predictions_asked,
)
from grader.study.progress_next import next_step

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
PART = "chapters/01_toy/a.ipynb"
LAB = "labs/01_toy/toy.ipynb"
MANIFEST = """
title: Toy
install_url: toy
chapters:
  - {number: 1, slug: toy, title: Toys, status: finished, minutes: 30, prerequisites: [],
     parts: [{name: a, title: First, minutes: 30}], labs: [{slug: toy, title: Build, minutes: 30, points: 6}]}
  - {number: 2, slug: later, title: Later, status: planned, minutes: 45, prerequisites: [1],
     labs: [{slug: later, title: Not yet, minutes: 30}]}
"""
QUIZ = "chapter: 01_toy\nitems:\n  - {id: one}\n  - {id: two}\n"


def code(id: str, source: str, run: int | None = None) -> dict[str, Any]:
    lines = source.splitlines(keepends=True)
    return {"cell_type": "code", "id": id, "metadata": {}, "source": lines, "execution_count": run, "outputs": []}


CELLS = [code("bootstrap", "import x"), code("guess", 'w.predict("p", "How many?", "GB")')]
CELLS += [code(name, f"{name} = 1") for name in ("one", "two", "three")]


def write(path: Path, cells: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))


def run(*names: str) -> list[dict[str, Any]]:
    return [cell | {"execution_count": 3 if cell["id"] in names else None} for cell in CELLS]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    root = tmp_path / "root"
    write(root / PART, CELLS)
    (root / "chapters/01_toy/quiz.yaml").write_text(QUIZ)
    (root / "chapters/course.yaml").write_text(MANIFEST)
    monkeypatch.setattr(workspace, "chapters_root", lambda: root / "chapters")
    monkeypatch.setenv("INFERLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    return load_course(root / "chapters/course.yaml")


@pytest.fixture
def home(course: Course, tmp_path: Path) -> Path:
    write(tmp_path / "home" / PART, CELLS)
    return tmp_path / "home"


def toy(course: Course, now: datetime = NOW) -> ChapterProgress:
    return measure(now, course).chapters[0]


def checked(earned: float, points: float = 6, minutes: int = 0, first: str = "check_window") -> None:
    checks = [CheckResult("check_a", earned, earned, "passed", "a")]
    checks += [CheckResult(first, points - earned, 0, "failed", "b")] if earned < points else []
    assert lab_log.record(Result("01_toy", points, checks=checks), NOW + timedelta(minutes=minutes)) == ""


def answered(key: str, correct: bool, now: datetime) -> None:
    from grader.quiz.question import Verdict
    from grader.quiz.review import record_answer

    record_answer(key, Verdict(correct, float(correct), ""), seed=0, seconds=1, now=now)


# ---------------------------------------------------------------- what is counted


def test_nothing_done_is_nothing_and_the_next_step_opens_the_course(course: Course) -> None:
    progress = measure(NOW, course)
    chapter = progress.chapters[0]
    assert (chapter.read, chapter.predicted, chapter.answered, chapter.due) == (0, 0, 0, 0)
    assert (chapter.predictions, chapter.items, chapter.parts[0].cells) == (1, 2, 4)
    assert chapter.labs[0].best is None
    assert progress.problems == []
    assert next_step(progress).command == "inferlab learn"
    assert next_step(progress).notebook == PART


def test_read_is_the_share_of_code_cells_run_without_the_generated_one(course: Course, home: Path) -> None:
    write(home / PART, run("bootstrap", "guess"))
    assert toy(course).read == 1 / 4
    write(home / PART, run("guess", "one", "two", "three"))
    assert toy(course).read == 1


def test_a_cell_counts_by_its_text_where_an_editor_changed_the_ids(course: Course, home: Path) -> None:
    write(home / PART, [cell | {"id": f"x{i}"} for i, cell in enumerate(run("one", "two"))])
    assert toy(course).read == 2 / 4


def test_a_cell_counts_by_its_id_where_the_learner_changed_its_text(course: Course, home: Path) -> None:
    write(home / PART, [code("one", "one = 2  # mine", run=1), code("mine", "my = 1", run=2)])
    assert toy(course).read == 1 / 4


def test_what_was_run_before_an_update_stays_read(course: Course, home: Path) -> None:
    write((home / PART).with_name("a.old.ipynb"), run("one"))
    write((home / PART).with_name("a.new2.ipynb"), run("two"))
    write((home / PART).with_name("a.mine.ipynb"), run("three"))
    assert toy(course).read == 2 / 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"cells": [{"cell_type": "code"}, 1]}', "\udcff"])
def test_a_damaged_notebook_is_named_and_the_rest_is_counted(course: Course, home: Path, text: str) -> None:
    (home / PART).write_bytes(text.encode("utf-8", "surrogateescape"))
    checked(2)
    progress = measure(NOW, course)
    assert progress.chapters[0].read is None
    assert progress.chapters[0].labs[0].best == 2
    assert [problem for problem in progress.problems if PART in problem and "not a notebook" in problem]
    assert "damaged" in next_step(progress).why


KEYS = st.sampled_from(["cell_type", "source", "id", "execution_count"])
VALUES = st.recursive(
    st.none() | st.integers() | st.sampled_from(["code", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
slow_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow_machine
@given(VALUES)
def test_any_json_is_a_notebook_or_said_not_to_be_one(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.ipynb"
    path.write_text(json.dumps({"cells": value}))
    found: set[str] = set()
    with contextlib.suppress(ValueError):  # and nothing else is raised
        found = executed_cells(path)
    assert all(isinstance(name, str) for name in found)


def test_predictions_are_found_in_the_calls_and_nowhere_else() -> None:
    assert predictions_asked('widgets.predict("a", "?", "GB")\n%time predict("b", "?", "s")') == ["a"]
    assert predictions_asked('predict("a", "?", "GB"); "predict(\'x\')"; predict(name, "?", "s")') == ["a"]
    assert predictions_asked("not python (") == []


def test_predicted_counts_guesses_and_says_how_near_they_were(course: Course, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    lines = ['{"id": "p", "guess": 4, "unit": "GB"}', '{"id": "elsewhere", "guess": 1}']
    (tmp_path / "data/predictions.jsonl").write_text("\n".join(lines) + "\n")
    assert (toy(course).predicted, toy(course).near) == (1, None)
    (tmp_path / "data/predictions.jsonl").write_text("\n".join([*lines, '{"id": "p", "answer": 12}']) + "\n")
    assert toy(course).near == pytest.approx(3)


@slow_machine
@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_nearness_is_the_same_for_too_much_and_too_little(guess: float, answer: float) -> None:
    near = nearness([(guess, answer), (None, 1.0), (1.0, None), (-1.0, 1.0)])
    assert near == pytest.approx(nearness([(answer, guess)]))
    assert near is not None
    assert near >= 1


def test_quiz_counts_items_of_today_once_and_what_is_due(course: Course) -> None:
    answered("01_toy/one", False, NOW - timedelta(days=30))
    answered("01_toy/one", True, NOW - timedelta(days=20))
    answered("01_toy/removed", True, NOW - timedelta(days=20))
    chapter = toy(course)
    assert (chapter.answered, chapter.right, chapter.items, chapter.due) == (1, 1, 2, 1)
    assert toy(course, NOW - timedelta(days=20)).due == 0


def test_solved_is_the_best_check_and_the_last_is_kept_too(course: Course) -> None:
    checked(6, minutes=1)
    checked(2, minutes=2)
    lab = toy(course).labs[0]
    assert (lab.best, lab.last, lab.first_open, lab.solved) == (6, 2, "check_window", True)


def test_full_marks_in_an_older_release_of_the_lab_do_not_solve_this_one(course: Course) -> None:
    checked(8, points=8)
    lab = toy(course).labs[0]
    assert not lab.solved
    assert lab.best is None


def test_a_check_cut_short_by_a_crash_costs_only_itself(course: Course) -> None:
    checked(2)
    with lab_log.log_path().open("ab") as file:
        file.write(b'\n{"v": 1, "lab": "01_t')
    checked(4, minutes=1)
    progress = measure(NOW, course)
    assert progress.chapters[0].labs[0].best == 4
    assert "1 damaged line" in progress.problems[0]


def test_a_data_folder_that_cannot_be_written_is_said_and_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "file" / "below"))
    assert "not in your progress" in lab_log.record(Result("01_toy", 6))


# ---------------------------------------------------------------- what to do next


def step_after(course: Course, now: datetime = NOW) -> str:
    step = next_step(measure(now, course))
    return f"{step.command} {step.notebook}".strip()


def test_the_next_step_leads_from_the_first_cell_to_the_end(course: Course, home: Path) -> None:
    assert step_after(course) == f"inferlab learn {PART}"
    write(home / PART, run("one"))
    assert "1 of 4 cells" in next_step(measure(NOW, course)).why
    write(home / PART, run("guess", "one", "two", "three"))
    assert step_after(course) == "inferlab quiz 01"
    answered("01_toy/one", True, NOW)
    assert step_after(course) == f"inferlab lab start 01 {LAB}"
    write(home / LAB, [])
    assert step_after(course) == f"inferlab lab check 01 {LAB}"
    checked(2)
    assert "begin with check_window" in next_step(measure(NOW, course)).why
    checked(6, minutes=1)
    assert step_after(course) == "inferlab quiz 01"
    answered("01_toy/two", True, NOW)
    assert step_after(course) == "inferlab quiz --interview --minutes 20"
    assert step_after(course, NOW + timedelta(days=60)) == "inferlab quiz"


def test_what_was_begun_comes_before_what_was_not() -> None:
    chapters = [
        ChapterProgress(n, f"0{n}_x", "X", False, (PartProgress(f"chapters/0{n}_x/a.ipynb", "A", 4, run),))
        for n, run in ((0, 0), (1, 1), (2, 0))
    ]
    assert next_step(Progress(Path("/home"), True, chapters)).notebook == "chapters/01_x/a.ipynb"


# ---------------------------------------------------------------- what is shown


def shown(course: Course, terminal: bool = False, width: int = 80) -> list[str]:
    progress = measure(NOW, course)
    console = Console(width=width, force_terminal=terminal, color_system=None, highlight=False)
    with console.capture() as capture:
        show(console, progress, next_step(progress))
    return capture.get().splitlines()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_planned_chapter_is_planned_and_not_nought_percent(course: Course, terminal: bool) -> None:
    lines = shown(course, terminal)
    row = next(line for line in lines if "02 Later" in line)
    assert row.split() == ["02", "Later", "planned"]
    assert next(line for line in lines if "01 Toys" in line).split() == ["01", "Toys", "0", "%", "0/1", "0/2", "-/6"]


def test_every_title_of_the_course_fits_eighty_columns_beside_full_numbers(tmp_path: Path) -> None:
    lab = LabProgress("02_kv_cache", "kv_cache", 20, True, 20, 20)
    numbers = {"predicted": 3, "predictions": 3, "near": 1.25, "answered": 27, "items": 27, "due": 27, "labs": (lab,)}
    part = PartProgress("chapters/x.ipynb", "X", 30, 30)
    chapters = [
        ChapterProgress(chapter.number, chapter.folder, chapter.title, False, (part,), **numbers)
        for chapter in load_course().chapters
    ]
    progress = Progress(tmp_path, True, chapters)
    for terminal in (False, True):
        console = Console(width=80, force_terminal=terminal, color_system=None, highlight=False)
        with console.capture() as capture:
            show(console, progress, next_step(progress))
        lines = capture.get().splitlines()
        for chapter, line in zip(chapters, lines[1:], strict=False):
            expected = f"{chapter.folder[:2]} {chapter.title}".split()
            assert line.split() == [*expected, "100", "%", "3/3", "×1.2", "27/27", "27", "20/20"]
            assert len(line.rstrip()) <= 80


def test_the_command_imports_no_torch_and_writes_no_colour_into_a_pipe(tmp_path: Path) -> None:
    script = "import sys; sys.argv[1:] = ['progress']\nfrom grader.cli import main\n"
    script += (
        "try: main()\nfinally: print('HEAVY', [m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    )
    environment = os.environ | {"INFERLAB_HOME": str(tmp_path / "h"), "INFERLAB_DATA": str(tmp_path / "d")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    assert "\x1b" not in done.stdout
    assert not list(tmp_path.iterdir()), "looking leaves nothing behind"


def test_json_holds_what_is_shown(course: Course, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grader.commands.progress_cli import app
    from grader.study import progress

    monkeypatch.setattr(progress, "load_course", lambda: course)
    checked(6)
    write(home / PART, run("one"))
    done = CliRunner().invoke(app, ["--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert document["chapters"][0]["read"] == 1 / 4
    assert document["chapters"][0]["labs"][0]["solved"] is True
    assert document["chapters"][1]["planned"] is True
    assert document["chapters"][1]["read"] is None
    assert document["next"]["notebook"] == PART
