"""Hostile code costs what it should and nobody else anything; honest code never loses a point to the machinery."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

# The first test grades all of them. Its limit is there for what hangs: on a busy machine it takes its time.
pytestmark = pytest.mark.timeout(2400)

HERE = Path(__file__).parent
FOLDERS = ("hostile", "greedy", "honest")
HOSTILE, GREEDY, HONEST = ([path.stem for path in sorted((HERE / name).glob("*.*py"))] for name in FOLDERS)


def has_what_is_expected(batch: Any, case: Any) -> None:
    student = batch.student(case.name)
    result = batch.result(student)
    messages = {check["grade_id"]: (check["status"], check["message"][-300:]) for check in result["checks"]}
    assert batch.statuses(student) == {**dict.fromkeys(case.points, "passed"), **case.expect}, (
        messages, result["printed"][-500:]
    )  # fmt: skip
    assert result["earned"] == case.earned
    assert batch.recorded()[student] == (case.earned, 0)
    whole = result["printed"] + "".join(check["message"] + check["seen"] for check in result["checks"])
    assert [text for text in case.says if text not in whole] == [], whole[-2000:]


@pytest.mark.parametrize("name", [*HOSTILE, *GREEDY, "uses_little_memory"])
def test_the_attack_has_its_expected_score_and_status(batch_of_code: Any, name: str, attack_case: Any) -> None:
    has_what_is_expected(batch_of_code, attack_case(name))


@pytest.mark.parametrize("name", HONEST)
def test_honest_work_has_all_its_points(batch_of_code: Any, name: str, attack_case: Any) -> None:
    case, student = attack_case(name), batch_of_code.student(name)
    result = batch_of_code.result(student)
    assert {c["grade_id"]: c["message"] for c in result["checks"] if c["status"] != "passed"} == {}
    assert batch_of_code.recorded()[student] == (6.0, 0)
    assert [text for text in case.says if text not in result["printed"]] == []


def test_every_submission_is_graded_and_none_by_a_failure_of_the_grader(batch_of_code: Any) -> None:
    students = {path.name for path in (batch_of_code.root / "submitted").iterdir()}
    assert len(students) == len(HOSTILE) + len(GREEDY) + 1 + len(HONEST)
    assert set(batch_of_code.recorded()) == students
    assert {s for s in students if batch_of_code.result(s)["secret"] == ""} == set()
    assert f"{len(students)} graded, 0 unchanged" in " ".join(batch_of_code.said.split())


def test_no_secret_and_no_hidden_test_is_in_anything_a_learner_gets(batch_of_code: Any) -> None:
    """Nor a folder of this machine."""
    for folder in ("results", "feedback", "autograded"):
        for path in sorted((batch_of_code.root / folder).rglob("*")):
            text = path.read_text("utf-8") if path.is_file() else ""
            for token in re.findall(r"CANARY-[0-9a-f]{16}", text):
                assert token == "CANARY-0123456789abcdef", path  # one attack writes this itself
            if folder == "feedback":
                assert "on random vectors the mean is off by {" not in text, path
                assert "course_secret" not in text or "writes_the" in path.name or "reads_every" in str(path), path


def test_no_page_carries_a_script_and_no_result_a_control_character(batch_of_code: Any) -> None:
    for path in sorted((batch_of_code.root / "feedback").rglob("*.html")):
        text = path.read_text("utf-8")
        assert not re.search(r"<\s*(script|img|iframe|object|svg|link|form|base)\b", text, re.IGNORECASE), path
        assert not re.search(r"\bon\w+\s*=\s*[\"']", text), path
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text), path
        assert path.stat().st_size < 1 << 20, path
    assert "&lt;script&gt;" in batch_of_code.page(batch_of_code.student("prints_50_mb_of_html"))
    for path in sorted((batch_of_code.root / "results").rglob("*.json")):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]|\\u00[01]", path.read_text("utf-8")), path
        assert path.stat().st_size < 1 << 18, path
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", batch_of_code.said)


def test_the_course_and_the_home_are_byte_for_byte_what_they_were(batch_of_code: Any) -> None:
    assert batch_of_code.files() == batch_of_code.before
    strangers = [path for path in batch_of_code.root.rglob("*") if batch_of_code.machine.mark in path.name]
    assert strangers == []
    tops = {path.name for path in batch_of_code.root.iterdir()}
    assert tops <= {"solutions", "labs", "received", "submitted", "autograded", "feedback", "results", "gradebook.db",
                    "course_secret.json", "canary.txt", "nbgrader_config.py", "README.md", ".gitignore", "roster.json",
                    "conventions.md"}  # fmt: skip


def test_nothing_of_a_submission_is_left_on_the_machine(batch_of_code: Any) -> None:
    mark = batch_of_code.machine.mark
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", os.environ["TMPDIR"], os.environ["HOME"]):
        left = {name for name in os.listdir(folder) if mark in name} if os.path.isdir(folder) else set()
        assert left <= {f"{mark}.txt"}, folder  # the canary
    temporary = {name for name in os.listdir(os.environ["TMPDIR"]) if not name.startswith(("pytest", "torchinductor"))}
    assert temporary == {"canary.txt"}


def left_behind(children_before: set[int]) -> list[bytes]:
    """Processes that were started with this module's folder for temporary files, and new children of this process."""
    own, left = os.getpid(), []
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        try:
            environ, parent = (path / "environ").read_bytes(), (path / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if os.environ["TMPDIR"].encode() in environ or (int(parent) == own and pid not in children_before):
                left += [(path / "cmdline").read_bytes()] if pid != own else []
        except OSError:
            continue
    return left


def test_no_process_is_left(batch_of_code: Any) -> None:
    end = time.monotonic() + 120  # what is killed needs a moment to go; none would go by itself
    while (left := left_behind(batch_of_code.children_before)) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


def test_nobody_reached_a_listener_of_this_machine(batch_of_code: Any) -> None:
    assert batch_of_code.machine.visitors == []
