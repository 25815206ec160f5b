"""A result file that cannot be read costs its own student's part, is named with what repairs it, and stops no other."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grader.courses.recorded import MAX_BYTES, read_result

SLUG = "01_toy"
Grade = Callable[..., str]


def changed(raw: bytes, **values: Any) -> bytes:
    return json.dumps({**json.loads(raw), **values}).encode()


def check_changed(raw: bytes, **values: Any) -> bytes:
    data = json.loads(raw)
    data["checks"][0] |= values
    return json.dumps(data).encode()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut short": lambda raw: raw[: len(raw) // 2],
    "binary": lambda raw: bytes(range(256)) * 40,
    "zeros, as after a power cut": lambda raw: bytes(len(raw)),
    "another value": lambda raw: b"[1, 2, 3]",
    "nothing in it": lambda raw: b"{}",
    "too deep": lambda raw: b"[" * 200_000,
    "a number of 5000 digits": lambda raw: b"9" * 5000,
    "a key too many": lambda raw: changed(raw, surprise=1),
    "points are text": lambda raw: changed(raw, points="six"),
    "seconds are nothing": lambda raw: changed(raw, seconds=None),
    "seconds are no number": lambda raw: changed(raw, seconds=float("nan")),
    "checks are text": lambda raw: changed(raw, checks="abc"),
    "a check is text": lambda raw: changed(raw, checks=["abc"]),
    "flags are numbers": lambda raw: changed(raw, flags=[1]),
    "an unknown status": lambda raw: check_changed(raw, status="fine"),
    "a check's points are a list": lambda raw: check_changed(raw, earned=[1]),
    "a check's message is a number": lambda raw: check_changed(raw, message=5),
}


def damage(course: Path, how: str, student: str = "cyd") -> Path:
    path = course / "results" / SLUG / f"{student}.json"
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    return path


@pytest.mark.parametrize("how", DAMAGE)
def test_nothing_but_a_whole_result_is_taken_for_one(graded_course: Path, tmp_path: Path, how: str) -> None:
    raw = (graded_course / "results" / SLUG / "cyd.json").read_bytes()
    (tmp_path / "cyd.json").write_bytes(raw)
    assert read_result(tmp_path / "cyd.json").to_json().encode() == raw
    (tmp_path / "cyd.json").write_bytes(DAMAGE[how](raw))
    with pytest.raises(ValueError, match=r"\w"):
        read_result(tmp_path / "cyd.json")


def test_every_command_goes_on_without_what_is_damaged(course: Path, tmp_path: Path, grade: Grade) -> None:
    damage(course, "cut short", "cyd")
    damage(course, "seconds are nothing", "fay")
    where = ("--course", str(course))
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    said = grade("report", "01", "--html", str(page), "--json", str(data), *where, ok=False)
    repair = f"inferlab grade run {SLUG} --student cyd"
    assert "gus: crashed in check_len" in said
    assert repair in said
    assert repair in page.read_text()
    report = json.loads(data.read_text())
    assert [one["student"] for one in report["damaged"]] == ["cyd", "fay"]
    assert {row["student"]: row["status"] for row in report["rows"]}["cyd"] == "damaged result"
    assert any("cyd" in cluster for cluster in report["similar"]["clusters"])  # what was handed in is all there

    for form in ("csv", "canvas", "moodle", "gradescope"):
        assert repair in grade("export", "01", "--format", form, "-o", str(tmp_path / form), *where, ok=False)
    rows = {row["student"]: row for row in csv.DictReader(io.StringIO((tmp_path / "csv").read_text(), newline=""))}
    assert (rows["cyd"]["total"], rows["cyd"]["status"], rows["ada"]["total"]) == ("3", "damaged result", "6")
    assert {path.name for path in (tmp_path / "gradescope").iterdir()} == set(rows) - {"cyd", "fay", "zoe"}

    said = grade("feedback", "01", *where, ok=False)
    assert "7 pages in feedback/" in said
    assert repair in said
    assert repair in grade("book", "--csv", str(tmp_path / "book.csv"), *where, ok=False)
    assert "cyd,,3,3" in (tmp_path / "book.csv").read_text()


@pytest.mark.parametrize("how", ["cut short", "points are text"])
def test_the_command_that_is_named_repairs_it(course: Path, grade: Grade, how: str) -> None:
    damage(course, how)
    said = grade("export", "01", "--course", str(course), ok=False)
    words = said.partition(": inferlab grade ")[2].split()[:4]
    assert words == ["run", SLUG, "--student", "cyd"]
    grade(*words, "--course", str(course))
    assert "damaged" not in grade("export", "01", "--course", str(course))
    assert json.loads((course / "results" / SLUG / "cyd.json").read_text())["earned"] == 3


def test_a_run_repairs_it_unasked(course: Path, grade: Grade) -> None:
    damage(course, "points are text")
    assert "1 graded, 8 unchanged" in grade("run", "01", "--course", str(course))


def test_a_folder_in_place_of_a_result_is_to_be_moved_away(course: Path, grade: Grade) -> None:
    path = course / "results" / SLUG / "cyd.json"
    path.unlink()
    path.mkdir()
    assert "move that folder away and grade it again" in grade("export", "01", "--course", str(course), ok=False)


def test_a_result_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "ada.json").open("w") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match="MiB, and a result has at most"):
        read_result(tmp_path / "ada.json")


def test_a_result_of_nobody_who_handed_in_is_to_be_deleted(course: Path, grade: Grade) -> None:
    (course / "results" / SLUG / "old copy.json").write_text("{")
    said = grade("export", "01", "--course", str(course), ok=False)
    assert f"delete results/{SLUG}/old copy.json" in said


def test_regrade_and_replay_say_what_is_damaged(course: Path, grade: Grade) -> None:
    damage(course, "cut short")
    assert "--student cyd" in grade("replay", "cyd", "01", "--course", str(course), ok=False)
    said = grade("regrade", "01", "--student", "cyd", "--course", str(course))
    assert "1 graded again" in said
    grade("export", "01", "--course", str(course))


def test_the_best_attempt_is_not_left_out_in_silence(course: Path, grade: Grade) -> None:
    kept = course / "results" / SLUG / "attempts" / "0123" / "fay.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{")
    where = ("--course", str(course))
    grade("book", *where)
    said = grade("book", "--best", *where, ok=False)
    assert f"results/{SLUG}/attempts/0123/fay.json" in said
    assert "ada" in said


def test_a_lab_that_cannot_be_read_costs_no_other_lab_its_points(course: Path, tmp_path: Path, grade: Grade) -> None:
    shutil.copytree(course / "labs" / SLUG, course / "labs" / "02_other")  # of which the gradebook has nothing
    where = ("--csv", str(tmp_path / "book.csv"), "--course", str(course))
    said = grade("book", *where, ok=False)
    assert "02_other is not in the gradebook; first: inferlab grade release 02_other" in said
    assert "ada" in said
    head, *rows = csv.reader(io.StringIO((tmp_path / "book.csv").read_text(), newline=""))
    assert head == ["student", "name", SLUG, "02_other", "total"]
    assert {row[0]: row[2:] for row in rows}["cyd"] == ["3", "", "3"]
    for command in ("report", "export"):
        assert "is not in the gradebook" in grade(command, "02", "--course", str(course), ok=False)
