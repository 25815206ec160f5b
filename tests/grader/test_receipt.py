"""What was handed in is kept, replaced by what is newer, and survives a kill; nbgrader's exchange is taken in."""

from __future__ import annotations

import json
import os
import zipfile
from datetime import UTC, tzinfo
from pathlib import Path
from typing import Any

import pytest

from grader.submissions import receipt
from grader.submissions.collect import collect
from grader.submissions.roster import Roster, Student, save_roster
from grader.submissions.submitted import take_in

ANSWER = "class Window:\n    pass"


def test_collecting_the_same_again_changes_nothing(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    source = disk.write(
        tmp_path / "in", {"ada/toy.ipynb": notebook(), "bob/toy.ipynb": b"{", "cy/toy (1).ipynb": notebook()}
    )
    collect(root, "01_toy", source)
    before = disk.tree(root)
    for path in source.rglob("*.ipynb"):
        os.utime(path, (2e9, 2e9))  # as a copy of the folder would
    done = collect(root, "01_toy", source)
    assert [one.news for one in done.received] == ["unchanged"] * 3
    assert disk.tree(root) == before


def test_a_later_submission_replaces_the_earlier_one_which_is_kept(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    for number in (1, 2, 3):
        text = notebook("first = 1" if number == 3 else f"version = {number}") if number < 3 else b"{"
        collect(root, "01_toy", disk.write(tmp_path / "in", {"ada/toy.ipynb": text}))
    history = receipt.read_history(root, "01_toy", "ada")
    assert [version.file for version in history] == ["1_toy.ipynb", "2_toy.ipynb", "3_toy.ipynb"]
    assert all(version.collected and version.time for version in history)
    assert disk.record(root, "ada")["refused"].endswith("it ends in the middle, as after a copy that broke off")
    assert (root / "received" / "ada" / "01_toy" / "2_toy.ipynb").read_bytes() == notebook("version = 2")


def test_an_lms_that_knows_an_attempt_to_be_older_does_not_undo_the_newer(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    def attempt(time: str, text: str) -> Path:
        name = f"Lab 1_ada_attempt_2026-11-01-{time}_toy.ipynb"
        return disk.zipped(
            tmp_path / f"{time}.zip", [(name, notebook(text)), (name.replace("_toy.ipynb", ".txt"), b"")]
        )

    collect(root, "01_toy", attempt("12-00-00", "new = 1"))
    done = collect(root, "01_toy", attempt("10-00-00", "old = 1"))
    assert done.received[0].news == "older"
    assert disk.answer(root, "ada") == "new = 1"
    assert len(receipt.read_history(root, "01_toy", "ada")) == 2
    assert collect(root, "01_toy", attempt("10-00-00", "old = 1")).received[0].news == "older"
    assert len(receipt.read_history(root, "01_toy", "ada")) == 2


def test_the_newest_attempt_in_one_download_counts(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    times = ("10-00-00", "12-00-00", "11-00-00")
    names = [(f"Lab_ada_attempt_2026-11-01-{time}_toy.ipynb", notebook(f"t = {time!r}")) for time in times]
    collect(root, "01_toy", disk.zipped(tmp_path / "bb.zip", list(names)))
    assert disk.answer(root, "ada") == "t = '12-00-00'"


def test_times_come_from_where_they_are_true_and_the_source_is_noted(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    entry = zipfile.ZipInfo("ada/toy.ipynb", (2026, 11, 1, 12, 0, 0))
    collect(root, "01_toy", disk.zipped(tmp_path / "a.zip", [(entry, notebook())]))
    assert (root / "submitted" / "ada" / "01_toy" / "timestamp.txt").read_text().startswith("2026-")
    assert disk.record(root, "ada")["time_from"] == "the file's own time"
    canvas = [("x_LATE_1_9_toy.ipynb", notebook()), ("y_2_9_toy.ipynb", notebook())]
    done = collect(root, "01_toy", disk.zipped(tmp_path / "c.zip", list(canvas)))
    assert [(one.student, one.late) for one in done.received] == [("1", True), ("2", False)]
    assert not (root / "submitted" / "1" / "01_toy" / "timestamp.txt").exists()  # the zip has the download's time
    assert (disk.record(root, "1")["late"], disk.record(root, "1")["time"]) == (True, "")


def test_of_equal_bytes_the_earlier_time_counts_and_an_lms_before_a_file(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    def counts(day: int, name: str = "", text: str = "x = 1", zone: tzinfo | None = None) -> tuple[str, str]:
        info = zipfile.ZipInfo(name or "ada/toy.ipynb", (2026, 11, day, 12, 0, 0))
        collect(root, "01_toy", disk.zipped(tmp_path / "a.zip", [(info, notebook(text))]), zone=zone)
        return disk.record(root, "ada")["time"][:10], disk.record(root, "ada")["time_from"]

    assert counts(20) == ("2026-11-20", "the file's own time")
    assert counts(10) == ("2026-11-10", "the file's own time")
    assert counts(25) == ("2026-11-10", "the file's own time")
    assert counts(25, text="y = 1") == ("2026-11-25", "the file's own time")
    assert counts(28) == ("2026-11-10", "the file's own time")  # what was there before is there again
    save_roster(root, Roster({"ada": Student("ada")}))
    name = "L_ada_attempt_2026-11-{}-10-00-00_toy.ipynb"
    on_this_clock = "blackboard's name for it, as this machine's clock has it"
    assert counts(1, name.format(15)) == ("2026-11-15", on_this_clock)
    assert counts(1, name.format(14)) == ("2026-11-14", on_this_clock)
    assert counts(1) == ("2026-11-14", on_this_clock)
    assert counts(1, name.format(16), zone=UTC) == ("2026-11-16", "blackboard's name for it")  # surer, so it counts
    assert counts(1, name.format(13)) == ("2026-11-16", "blackboard's name for it")
    receipt.set_time(root, "01_toy", "ada", None)
    assert counts(1, name.format(13)) == ("", receipt.BY_HAND)


def test_all_attempts_in_one_download_are_kept_and_the_last_counts(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    save_roster(root, Roster({"ada": Student("ada")}))
    name = "L_ada_attempt_2026-11-{}-10-00-00_toy.ipynb"
    texts = {14: "first = 1", 15: "second = 1", 16: "third = 1"}
    files = [(zipfile.ZipInfo(name.format(day)), notebook(text)) for day, text in sorted(texts.items(), reverse=True)]
    source = disk.zipped(tmp_path / "a.zip", files)
    (one,) = collect(root, "01_toy", source, zone=UTC).received
    assert one.news == "new"
    assert [note for note in one.notes if "attempt" in note] == [
        f"an earlier attempt is kept, too, of 2026-11-{day} 10:00 UTC" for day in (14, 15)
    ]
    history = receipt.read_history(root, "01_toy", "ada")
    assert [version.time[:10] for version in history] == ["2026-11-14", "2026-11-15", "2026-11-16"]
    kept = [(root / "received" / "ada" / "01_toy" / version.file).read_bytes() for version in history]
    assert kept == [notebook(text) for text in texts.values()]
    assert disk.answer(root, "ada") == "third = 1"
    assert [one.news for one in collect(root, "01_toy", source, zone=UTC).received] == ["unchanged"]
    assert receipt.read_history(root, "01_toy", "ada") == history


def test_where_the_last_attempt_cannot_be_read_and_an_earlier_one_can_a_person_is_asked(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    save_roster(root, Roster({"ada": Student("ada")}))
    name = "L_ada_attempt_2026-11-{}-10-00-00_toy.ipynb"
    files = [(zipfile.ZipInfo(name.format(14)), notebook("first = 1")), (zipfile.ZipInfo(name.format(15)), b"{")]
    source, asked = disk.zipped(tmp_path / "a.zip", files), []

    def allow(doubts: dict[str, str]) -> bool:
        asked.append(doubts)
        return False

    done = collect(root, "01_toy", source, allow=allow)
    assert "it would be refused" in asked[0]["ada"]
    assert list(done.kept) == ["ada"]
    assert disk.answer(root, "ada") == "first = 1"


def test_what_an_lms_said_of_equal_bytes_stays_said_when_a_folder_brings_them_again(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    save_roster(root, Roster({"ada": Student("ada", ids={"canvas_id": "1"})}))
    for name, said in (
        ("adaada_1_7_toy.ipynb", False),
        ("ada/toy.ipynb", False),
        ("adaada_LATE_1_7_toy.ipynb", True),  # the LMS itself may change its mind
        ("ada/toy.ipynb", True),
    ):
        collect(root, "01_toy", disk.zipped(tmp_path / "a.zip", [(name, notebook("x = 1"))]))
        assert disk.record(root, "ada")["late"] is said
    for text, expected in (("y = 1", None), ("x = 1", True)):  # replaced, and there again
        collect(root, "01_toy", disk.zipped(tmp_path / "a.zip", [("ada/toy.ipynb", notebook(text))]))
        assert disk.record(root, "ada")["late"] is expected


def exchange(disk: Any, root: Path, files: dict[str, bytes]) -> Path:
    """What `nbgrader collect` puts into submitted/, a time included."""
    folder = disk.write(root / "submitted" / "ada" / "01_toy", files)
    (folder / "timestamp.txt").write_text("2026-11-01 10:00:00.000000 UTC")
    return folder


def test_what_nbgraders_exchange_brings_is_taken_in_and_cleaned(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    folder = exchange(disk, root, {"toy.ipynb": notebook().replace(b"check_len", b"check_new"), "data/x.csv": b"1"})
    (folder / "passwd").symlink_to("/etc/passwd")
    take_in(root, "01_toy", "ada")
    assert sorted(path.name for path in folder.iterdir()) == ["intake.json", "timestamp.txt", "toy.ipynb"]
    assert disk.answer(root, "ada") == ANSWER
    assert b"check_new" not in (folder / "toy.ipynb").read_bytes()
    before = disk.tree(root)
    take_in(root, "01_toy", "ada")
    assert disk.tree(root) == before
    (folder / "intake.json").unlink()  # nbgrader collect --update replaces the folder
    exchange(disk, root, {"toy.ipynb": notebook("second = 2")})
    take_in(root, "01_toy", "ada")
    assert disk.answer(root, "ada") == "second = 2"
    assert len(receipt.read_history(root, "01_toy", "ada")) == 2


def test_a_collect_after_the_exchange_keeps_both_and_cleans_the_folder(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    folder = exchange(disk, root, {"toy.ipynb/x": b"1", "toy (1).ipynb": notebook("early = 1"), "data.csv": b"1"})
    collect(root, "01_toy", disk.write(tmp_path / "in", {"ada/toy.ipynb": notebook("late = 1")}))
    assert disk.answer(root, "ada") == "late = 1"
    assert sorted(path.name for path in folder.iterdir()) == ["intake.json", "timestamp.txt", "toy.ipynb"]
    first, second = receipt.read_history(root, "01_toy", "ada")
    assert (first.path, second.path) == ("toy (1).ipynb", "ada/toy.ipynb")
    before = disk.tree(root)
    take_in(root, "01_toy", "ada")
    assert disk.tree(root) == before


def test_what_nbgrader_finds_feedback_by_is_kept_if_it_is_that(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    folder = exchange(disk, root, {"toy.ipynb": notebook(), "submission_secret.txt": b"0f" * 64})
    take_in(root, "01_toy", "ada")
    assert (folder / "submission_secret.txt").read_bytes() == b"0f" * 64
    (folder / "intake.json").unlink()
    exchange(disk, root, {"toy.ipynb": notebook("x = 2"), "submission_secret.txt": b"<script>"})
    take_in(root, "01_toy", "ada")
    assert not (folder / "submission_secret.txt").exists()
    times = {"2026-11-02 10:00:00.0 UTC": b"aa", "2026-11-03 10:00:00.0 UTC": b"bb"}
    files = {f"ada+01_toy+{time}+r/submission_secret.txt": secret for time, secret in times.items()}
    files |= {f"ada+01_toy+{time}+r/toy.ipynb": notebook(f"x = '{time}'") for time in times}
    done = collect(root, "01_toy", disk.write(tmp_path / "inbound", files))
    assert (done.form, (folder / "submission_secret.txt").read_bytes()) == ("exchange", b"bb")
    assert "2026-11-03" in disk.answer(root, "ada")
    before = disk.tree(root)
    take_in(root, "01_toy", "ada")
    assert disk.tree(root) == before


@pytest.mark.parametrize("forged", [{"received": "x", "refused": ""}, {"pending": True}, 7])
def test_an_intake_record_that_a_learner_brings_is_not_believed(
    root: Path, notebook: Any, forged: Any, disk: Any
) -> None:
    raw = notebook("mine = 1").replace(b"assert", b"pass #")
    folder = exchange(disk, root, {"toy.ipynb": raw, "intake.json": json.dumps(forged).encode()})
    take_in(root, "01_toy", "ada")
    assert disk.answer(root, "ada") == "mine = 1"
    assert b"assert" in (folder / "toy.ipynb").read_bytes()


@pytest.mark.parametrize("record", [b"[" * 200_000, b"9" * 5000, b"\xff", b"\0" * 10, b"[1", b" " * (2 << 20)])
def test_an_intake_record_of_any_form_stops_nothing(root: Path, notebook: Any, record: bytes, disk: Any) -> None:
    exchange(disk, root, {"toy.ipynb": notebook("mine = 1"), "intake.json": record})
    take_in(root, "01_toy", "ada")
    assert disk.answer(root, "ada") == "mine = 1"


def test_a_pipe_in_an_exchange_folder_is_not_waited_for(root: Path, notebook: Any, disk: Any) -> None:
    folder = exchange(disk, root, {"toy.ipynb": notebook("mine = 1")})
    (folder / "timestamp.txt").unlink()
    for name in ("timestamp.txt", "intake.json", "submission_secret.txt"):
        os.mkfifo(folder / name)
    take_in(root, "01_toy", "ada")
    assert disk.answer(root, "ada") == "mine = 1"
    assert sorted(path.name for path in folder.iterdir()) == ["intake.json", "toy.ipynb"]


def test_an_exchange_folder_without_a_usable_notebook_is_a_recorded_refusal(root: Path, disk: Any) -> None:
    folder = exchange(disk, root, {"toy.ipynb/x": b"1", "intake.json/y": b"2"})
    (folder / "timestamp.txt").write_text("tomorrow, I promise " * 10)
    take_in(root, "01_toy", "ada")
    assert "is a folder" in disk.record(root, "ada")["refused"]
    assert sorted(path.name for path in folder.iterdir()) == ["intake.json", "toy.ipynb"]


@pytest.mark.parametrize("step", range(1, 12))
def test_a_kill_at_any_write_loses_nothing(
    root: Path, tmp_path: Path, notebook: Any, monkeypatch: pytest.MonkeyPatch, step: int, disk: Any
) -> None:
    """After a kill at the n-th rename or removal, grading sees the old submission or the new one, whole."""
    collect(root, "01_toy", disk.write(tmp_path / "in", {"ada/toy.ipynb": notebook("old = 1")}))
    newer = disk.write(tmp_path / "in", {"ada/toy.ipynb": notebook("new = 1"), "bob/toy.ipynb": b"{"})
    calls, replace = [0], os.replace

    def killed(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == step:
            raise KeyboardInterrupt
        replace(*arguments)

    monkeypatch.setattr(os, "replace", killed)
    interrupted = False
    try:
        collect(root, "01_toy", newer)
    except KeyboardInterrupt:
        interrupted = True
    monkeypatch.undo()
    assert interrupted == (calls[0] >= step)
    for folder in (root / "submitted").glob("*/01_toy"):
        take_in(root, "01_toy", folder.parent.name)
    found = disk.answer(root, "ada")
    history = receipt.read_history(root, "01_toy", "ada")
    assert found == ("new = 1" if len(history) == 2 else "old = 1")
    assert disk.record(root, "ada")["received"] == history[-1].sha256
    collect(root, "01_toy", newer)
    assert disk.answer(root, "ada") == "new = 1"
    assert len(receipt.read_history(root, "01_toy", "ada")) == 2
    assert disk.record(root, "bob")["refused"]
