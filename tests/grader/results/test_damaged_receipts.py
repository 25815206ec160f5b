"""Damaged receipts cost their own student's part, never a wrong grade; a damaged roster stops, and says what to do."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grader.course import CourseError
from grader.submissions.collect import collect
from grader.submissions.history import DamagedReceipt, read_history
from grader.submissions.receipt import read_record, whole
from grader.submissions.repair import repair
from grader.submissions.roster import Roster, Student, load_roster, save_roster
from grader.submissions.submitted import take_in
from tests.grader.results.conftest import APPLY, DEQUE, IN_TIME, hand_in

SLUG = "01_toy"
Grade = Callable[..., str]
GENERAL: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda raw: b"",
    "cut short": lambda raw: raw[: len(raw) // 2],
    "binary": lambda raw: bytes(range(256)) * 40,
    "zeros, as after a power cut": lambda raw: bytes(len(raw)),
    "nothing in it": lambda raw: b"{}",
    "an empty list": lambda raw: b"[]",
    "numbers": lambda raw: b"[1, 2]",
    "a number of 5000 digits": lambda raw: b"9" * 5000,
    "too deep": lambda raw: b"[" * 200_000,
    "a folder": lambda raw: None,
}


def last(raw: bytes, **values: Any) -> bytes:
    data = json.loads(raw)
    data[-1] |= values
    return json.dumps(data).encode()


def without(raw: bytes, name: str) -> bytes:
    data = json.loads(raw)
    data[-1].pop(name)
    return json.dumps(data).encode()


HISTORY = GENERAL | {
    "a time is a number": lambda raw: last(raw, time=5),
    "a time without a zone": lambda raw: last(raw, time="2026-03-01T12:00:00"),
    "a time that is none": lambda raw: last(raw, time="yesterday"),
    "late is a text": lambda raw: last(raw, late="no"),
    "notes are a text": lambda raw: last(raw, notes="abc"),
    "a file elsewhere": lambda raw: last(raw, file="../../bob/01_toy/1_toy.ipynb"),
    "a digest that is none": lambda raw: last(raw, sha256="abc"),
    "a number that is a truth": lambda raw: last(raw, number=True),
    "a field too many": lambda raw: last(raw, surprise=1),
    "a field is missing": lambda raw: without(raw, "time_from"),
}


def record(raw: bytes, **values: Any) -> bytes:
    return json.dumps(json.loads(raw) | values).encode()


RECORD = GENERAL | {
    "notes are a number": lambda raw: record(raw, notes=5),
    "a digest is nothing": lambda raw: record(raw, received=None),
    "another's": lambda raw: record(raw, received="0" * 64, sha256="0" * 64),
}


def spoil(path: Path, how: Callable[[bytes], bytes | None]) -> None:
    made = how(path.read_bytes())
    if made is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(made)


def history_of(root: Path, student: str) -> Path:
    return root / "received" / student / SLUG / "received.json"


@pytest.fixture
def collected(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> Path:
    """A course folder in which ada handed in twice and bob once."""
    for answer in ("first = 1", "second = 2"):
        collect(root, SLUG, disk.write(tmp_path / "in", {"ada/toy.ipynb": notebook(answer)}))
    collect(root, SLUG, disk.write(tmp_path / "more", {"bob/toy.ipynb": notebook("mine = 1")}))
    return root


@pytest.mark.parametrize("how", HISTORY)
def test_a_collect_goes_on_without_whose_history_is_damaged(
    collected: Path, tmp_path: Path, notebook: Any, disk: Any, how: str
) -> None:
    spoil(history_of(collected, "ada"), HISTORY[how])
    before = disk.tree(collected / "received" / "ada"), disk.tree(collected / "submitted" / "ada")
    files = {"ada/toy.ipynb": notebook("third = 3"), "bob/toy.ipynb": notebook("new = 2"), "cyd/toy.ipynb": notebook()}
    done = collect(collected, SLUG, disk.write(tmp_path / "in", files))
    assert [one.student for one in done.received] == ["bob", "cyd"]
    (error,) = done.damaged
    assert (error.student, "received/ada/01_toy/received.json is damaged (" in str(error)) == ("ada", True)
    assert f"inferlab grade repair {SLUG} --student ada" in str(error)
    assert disk.answer(collected, "bob") == "new = 2"
    assert before == (disk.tree(collected / "received" / "ada"), disk.tree(collected / "submitted" / "ada"))


@pytest.mark.parametrize("how", HISTORY)
def test_what_counts_and_its_time_are_as_before_when_a_history_is_repaired(
    collected: Path, tmp_path: Path, notebook: Any, disk: Any, how: str
) -> None:
    kept, there = read_history(collected, SLUG, "ada")[-1], disk.tree(collected / "submitted")
    spoil(history_of(collected, "ada"), HISTORY[how])
    assert "2_toy.ipynb counts" in repair(collected, SLUG, "ada")
    first, counts = read_history(collected, SLUG, "ada")
    assert (counts.file, counts.sha256, counts.path, counts.form) == (kept.file, kept.sha256, kept.path, kept.form)
    assert (counts.time, counts.time_from, counts.late) == (kept.time, kept.time_from, kept.late)
    assert first.file == "1_toy.ipynb"
    assert disk.tree(collected / "submitted") == there
    assert list((collected / "received" / "ada" / SLUG).glob("received.json.damaged"))
    assert repair(collected, SLUG, "ada") == "nothing is damaged"
    collect(collected, SLUG, disk.write(tmp_path / "in", {"ada/toy.ipynb": notebook("third = 3")}))
    assert [one.file for one in read_history(collected, SLUG, "ada")] == [f"{n}_toy.ipynb" for n in (1, 2, 3)]


def test_a_history_that_is_gone_is_not_an_empty_one(collected: Path) -> None:
    history_of(collected, "ada").unlink()
    with pytest.raises(DamagedReceipt, match="missing"):
        read_history(collected, SLUG, "ada")
    repair(collected, SLUG, "ada")
    assert len(read_history(collected, SLUG, "ada")) == 2


def test_a_history_of_which_too_little_is_left_is_not_guessed(collected: Path, disk: Any) -> None:
    for student in ("ada", "bob"):
        history_of(collected, student).write_text("{")
    (collected / "received" / "ada" / SLUG / "intake.json").write_text("{")
    (collected / "received" / "bob" / SLUG / "2_toy.ipynb").write_bytes(b"which came later, or an LMS brought later")
    before = disk.tree(collected / "received")
    for student in ("ada", "bob"):
        with pytest.raises(CourseError, match=f"move received/{student}/01_toy submitted/{student}/01_toy out of"):
            repair(collected, SLUG, student)
    assert disk.tree(collected / "received") == before


def test_a_repaired_history_overwrites_no_kept_file(collected: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    folder = collected / "received" / "ada" / SLUG
    (folder / "1_toy.ipynb").unlink()  # as where one entry had no file: numbers are no longer those of the entries
    history_of(collected, "ada").write_text("{")
    repair(collected, SLUG, "ada")
    kept = (folder / "2_toy.ipynb").read_bytes()
    collect(collected, SLUG, disk.write(tmp_path / "in", {"ada/toy.ipynb": notebook("third = 3")}))
    assert (folder / "2_toy.ipynb").read_bytes() == kept
    assert (folder / "3_toy.ipynb").read_bytes() == notebook("third = 3")


@pytest.mark.parametrize("where", ["submitted", "received"])
@pytest.mark.parametrize("how", RECORD)
def test_a_damaged_record_of_intake_is_made_anew_and_nothing_counts_as_handed_in(
    collected: Path, disk: Any, where: str, how: str
) -> None:
    before = disk.tree(collected / "submitted"), history_of(collected, "ada").read_bytes()
    spoil(collected / where / "ada" / SLUG / "intake.json", RECORD[how])
    take_in(collected, SLUG, "ada")
    assert before == (disk.tree(collected / "submitted"), history_of(collected, "ada").read_bytes())
    assert whole(read_record(collected / "received" / "ada" / SLUG))


@pytest.mark.parametrize("how", ["cut short", "nothing in it", "a folder"])
def test_a_damaged_record_does_not_hide_what_the_exchange_brought(
    collected: Path, notebook: Any, disk: Any, how: str
) -> None:
    folder = collected / "submitted" / "ada" / SLUG
    (folder / "intake.json").unlink()
    (folder / "toy.ipynb").write_bytes(notebook("third = 3"))
    kept = collected / "received" / "ada" / SLUG / "intake.json"
    raw = kept.read_bytes()
    spoil(kept, GENERAL[how])
    with pytest.raises(DamagedReceipt, match=r"received/ada/01_toy/intake.json is damaged"):
        take_in(collected, SLUG, "ada")
    assert disk.answer(collected, "ada") == "third = 3"
    if kept.is_dir():
        kept.rmdir()
    kept.write_bytes(raw)
    take_in(collected, SLUG, "ada")
    assert len(read_history(collected, SLUG, "ada")) == 3


@pytest.mark.parametrize("how", ["cut short", "binary", "gone", "a folder"])
def test_a_kept_file_that_is_damaged_is_not_graded_and_comes_back_with_a_collect(
    collected: Path, tmp_path: Path, notebook: Any, disk: Any, how: str
) -> None:
    path = collected / "received" / "ada" / SLUG / "2_toy.ipynb"
    if how == "gone":
        path.unlink()
    else:
        spoil(path, GENERAL[how])
    (collected / "submitted" / "ada" / SLUG / "intake.json").write_text('{"pending": true}')  # a kill, say
    with pytest.raises(DamagedReceipt, match=r"2_toy.ipynb is damaged .* collect the same file again"):
        take_in(collected, SLUG, "ada")
    if how == "a folder":
        path.rmdir()
    (collected / "submitted" / "ada" / SLUG / "intake.json").write_text("{}")
    shutil.copy(collected / "received" / "ada" / SLUG / "intake.json", collected / "submitted" / "ada" / SLUG)
    collect(collected, SLUG, disk.write(tmp_path / "in", {"ada/toy.ipynb": notebook("second = 2")}))
    assert path.read_bytes() == notebook("second = 2")


ROSTER = GENERAL | {
    "a list": lambda raw: b"[]",
    "students are a text": lambda raw: b'{"students": "abc", "others": {}}',
    "a student is a text": lambda raw: b'{"students": ["ada"], "others": {}}',
    "an id is a number": lambda raw: raw.replace(b'"ada"', b"5"),
    "an id is empty": lambda raw: raw.replace(b'"ada"', b'""'),
    "an id is there twice": lambda raw: raw.replace(b'"bob"', b'"ada"'),
    "a name is a number": lambda raw: raw.replace(b'"Ada"', b"5"),
    "ids are a list": lambda raw: raw.replace(b'"ids": {}', b'"ids": []', 1),
    "an id in an LMS is a number": lambda raw: raw.replace(b'"4711"', b"4711"),
    "others are pairs": lambda raw: b'{"students": [], "others": [["a", "b"]]}',
    "an other is a number": lambda raw: raw.replace(b'"canvas:9"', b"9"),
    "a field too many": lambda raw: raw.replace(b'"email"', b'"mail"'),
}


@pytest.mark.parametrize("how", ROSTER)
def test_a_damaged_roster_stops_and_says_what_to_do(collected: Path, notebook: Any, tmp_path: Path, disk: Any, how: str
) -> None:  # fmt: skip
    roster = Roster({"ada": Student("ada", "Ada", ids={"canvas_id": "4711"}), "bob": Student("bob")}, {"x": "canvas:9"})
    save_roster(collected, roster)
    assert load_roster(collected) == roster
    path = collected / "roster.json"
    spoil(path, ROSTER[how])
    before = disk.tree(collected)
    with pytest.raises(CourseError, match=r"roster.json is damaged \(.*put it back from a copy.*inferlab grade roster"):
        collect(collected, SLUG, disk.write(tmp_path / "in", {"ada/toy.ipynb": notebook("third = 3")}))
    assert disk.tree(collected) == before


@pytest.mark.parametrize("how", ["a folder", "too deep", "ids are a list"])
@pytest.mark.parametrize(
    "words", ["late 01 --time ada unknown", "extend ada 01 2", "export 01", "roster {csv}", "book"]
)
def test_no_command_ends_in_a_traceback_for_a_damaged_roster(
    course: Path, tmp_path: Path, grade: Grade, how: str, words: str
) -> None:
    (tmp_path / "r.csv").write_text("id,name\nada,Ada L\n")
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", "--course", str(course))
    roster = course / "roster.json"
    roster.write_bytes(re.sub(rb'"ids": \{[^}]*\}', b'"ids": {}', roster.read_bytes()))
    spoil(roster, ROSTER[how])
    said = grade(*words.format(csv=tmp_path / "r.csv").split(), "--course", str(course), ok=False)
    assert "roster.json is damaged (" in said


def test_a_run_grades_the_others_and_leaves_the_grade_of_who_is_damaged(course: Path, grade: Grade) -> None:
    history_of(course, "cyd").write_text("[")
    result = (course / "results" / SLUG / "cyd.json").read_bytes()
    new = course.parent / "new"
    for student in ("ada", "cyd"):
        hand_in(new, course / "labs" / SLUG / "toy.ipynb", student, {"Window": DEQUE, "apply_all": APPLY}, IN_TIME)
    where = ("--course", str(course))
    said = grade("collect", "01", str(new), *where, ok=False)
    assert "1 submissions taken in" in said
    command = f"inferlab grade repair {SLUG} --student cyd"
    assert command in said
    said = grade("run", "01", "--workers", "1", *where, ok=False)
    assert "1 graded, 7 unchanged" in said
    assert "they keep the grade they had" in said
    assert command in said
    assert (course / "results" / SLUG / "cyd.json").read_bytes() == result
    assert command in grade("regrade", "01", "--dry-run", *where, ok=False)
    assert "cyd: received.json is made anew" in grade(*shlex.split(command)[2:], *where)
    assert "1 submissions taken in" not in grade("collect", "01", str(new), "--yes", *where)
    assert "1 graded, 8 unchanged" in grade("run", "01", "--workers", "1", *where)


def test_what_a_late_submission_costs_is_not_guessed(course: Path, tmp_path: Path, grade: Grade) -> None:
    where = ("--course", str(course))
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", *where)
    history_of(course, "ada").write_text("[")  # in time: nothing depends on it
    assert "eve" in grade("late", "01", "--per-day", "0.1", *where)
    assert "ada" in grade("export", "01", *where)
    rows = (course / "gradebook.db").read_bytes()
    history_of(course, "eve").write_text("[")
    for words in ("late 01", "export 01", "report 01", "feedback 01"):
        said = grade(*words.split(), *where, ok=False)
        assert f"inferlab grade repair {SLUG} --student eve" in said, words
        assert "--student ada" not in said
    assert (course / "gradebook.db").read_bytes() == rows
    assert "the instructor" in grade("repair", "01", *where)
    assert "eve" in grade("late", "01", *where)


def test_who_has_damaged_receipts_and_no_time_is_listed(course: Path, grade: Grade) -> None:
    grade("due", "01", "2026-03-01 23:59 Europe/Berlin", "--course", str(course))
    history_of(course, "gus").write_text("[")
    assert f"inferlab grade repair {SLUG} --student gus" in grade("late", "01", "--course", str(course))


def test_a_pipe_in_place_of_a_history_or_a_roster_is_not_waited_for(collected: Path) -> None:
    for path in (history_of(collected, "ada"), collected / "roster.json"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with pytest.raises(DamagedReceipt, match="not a file"):
        read_history(collected, SLUG, "ada")
    with pytest.raises(CourseError, match="not a file"):
        load_roster(collected)
