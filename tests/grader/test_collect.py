"""Collecting: what a class hands in ends as one clean notebook per student, or as a recorded refusal."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from grader.course import CourseError
from grader.submissions.collect import Collected, collect
from grader.submissions.roster import Roster, Student, save_roster

ANSWER = "class Window:\n    pass"


def reasons(done: Collected) -> dict[str, str]:
    return {one.student: one.refused for one in done.received}


def notes(done: Collected) -> dict[str, str]:
    return {one.student: "; ".join(one.notes) for one in done.received}


def test_of_a_students_files_the_best_named_one_is_taken_and_the_others_are_named(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    right, wrong = notebook("right = 1"), notebook("wrong = 1")
    source = disk.write(
        tmp_path / "in",
        {
            "a/toy.ipynb": right, "a/toy (1).ipynb": wrong, "a/x.ipynb": wrong,
            "b/toy (2).ipynb": wrong, "b/toy (10).ipynb": right, "b/toy-Copy1.ipynb": wrong,
            "c/Copy of toy.ipynb": right, "c/notes.ipynb": b"{}",
            "d/TOY.ipynb": right, "d/toy-1.ipynb": wrong,
            "e/toy.ipynb.txt": right,
            "f/final.ipynb": right, "f/other.ipynb": json.dumps({"cells": []}).encode(),
            "g/01_toy/toy.ipynb": right, "g/toy.ipynb": wrong,
            "h/old/toy.ipynb": wrong, "h/toy.ipynb": right,
            "i/lab.ipynb": right,
        },
    )  # fmt: skip
    done = collect(root, "01_toy", source)
    assert reasons(done) == dict.fromkeys("abcdefghi", "")
    assert {disk.answer(root, student) for student in "abcdefghi"} == {"right = 1"}
    said = notes(done)
    assert said["a"] == "of several files toy.ipynb was taken; left out: toy (1).ipynb, x.ipynb"
    assert "toy (10).ipynb: it was taken for toy.ipynb" in said["b"]
    assert said["i"] == "the file is named lab.ipynb: it was taken for toy.ipynb"


def test_what_holds_no_notebook_is_refused_with_what_was_there(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    source = disk.write(
        tmp_path / "in",
        {
            "a/toy.py": b"x = 1", "b/report.pdf": b"%PDF", "c/x.ipynb": notebook(), "c/y.ipynb": notebook(),
            "d/toy.rar": b"Rar!", "e/data.csv": b"1", "e/toy.html": b"<html>",
        },
    )  # fmt: skip
    said = reasons(collect(root, "01_toy", source))
    assert said["a"] == "a Python file was handed in (toy.py), not the notebook: hand in toy.ipynb"
    assert said["b"] == "no notebook was handed in, but report.pdf: hand in toy.ipynb"
    assert said["c"] == "several notebooks were handed in (x.ipynb, y.ipynb), none of them is named toy.ipynb"
    assert "toy.rar" in said["d"]
    assert said["e"] == "no notebook was handed in, but data.csv, toy.html: hand in toy.ipynb"
    assert (root / "received" / "a" / "01_toy" / "1_toy.py").read_bytes() == b"x = 1"


def test_a_zip_instead_of_a_notebook_is_opened_once(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    def inner(name: str, files: list[tuple[str | zipfile.ZipInfo, bytes]]) -> bytes:
        return disk.zipped(tmp_path / name, files).read_bytes()

    link = zipfile.ZipInfo("toy.ipynb")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    good = inner(
        "good.zip", [("my lab/toy.ipynb", notebook()), ("my lab/data.bin", b"1"), ("__MACOSX/._toy.ipynb", b"")]
    )
    source = disk.write(
        tmp_path / "in",
        {
            "good/lab.zip": good,
            "renamed/toy.ipynb": good,
            "nested/a.zip": inner("nested.zip", [("b.zip", good)]),
            "linked/a.zip": inner("linked.zip", [(link, b"/etc/passwd")]),
            "empty/a.zip": inner("empty.zip", []),
            "damaged/a.zip": good[: len(good) // 2],
            "crowded/a.zip": inner("crowded.zip", [(f"f{n}", b"") for n in range(20_001)]),
            "bomb/a.zip": inner("bomb.zip", [("toy.ipynb", bytes(80 << 20))]),
        },
    )
    done = collect(root, "01_toy", source)
    said = reasons(done)
    assert (said["good"], said["renamed"]) == ("", "")
    assert disk.answer(root, "good") == disk.answer(root, "renamed") == ANSWER
    assert "a zip was handed in (lab.zip): the notebook in it was taken" in notes(done)["good"]
    assert "zip in a zip" in said["nested"]
    assert "link" in said["linked"]
    assert "no notebook in a.zip" in said["empty"]
    assert "damaged" in said["damaged"]
    assert "more than 20000 files" in said["crowded"]
    assert "at most 64 MiB" in said["bomb"]
    assert (root / "received" / "nested" / "01_toy" / "1_toy.zip").exists()


def test_nothing_in_a_folder_but_plain_files_is_opened(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    source = disk.write(
        tmp_path / "in", {"ok/toy.ipynb": notebook(), "dir/toy.ipynb/x": b"", "other/toy.ipynb": notebook("x")}
    )
    secret = disk.write(tmp_path / "secret", {"toy.ipynb": notebook("stolen = 1")})
    for student in ("file", "fifo", "device", "loop", "partly"):
        (source / student).mkdir()
    (source / "file" / "toy.ipynb").symlink_to(secret / "toy.ipynb")
    (source / "folder").symlink_to(secret)
    (source / "loop" / "toy.ipynb").symlink_to("toy.ipynb")
    (source / "partly" / "toy.ipynb").symlink_to("/etc/passwd")
    (source / "partly" / "toy (1).ipynb").write_bytes(notebook("mine = 1"))
    (source / "neighbour.ipynb").symlink_to(source / "other" / "toy.ipynb")
    os.mkfifo(source / "fifo" / "toy.ipynb")
    try:
        os.mknod(source / "device" / "toy.ipynb", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        os.mkfifo(source / "device" / "toy.ipynb")
    done = collect(root, "01_toy", source)
    said = reasons(done)
    for student in ("file", "folder", "loop", "neighbour"):
        assert "is a link" in said[student]
    assert "is a folder" in said["dir"]
    assert "pipe or a device" in said["fifo"]
    assert "pipe or a device" in said["device"]
    assert (said["ok"], disk.answer(root, "partly")) == ("", "mine = 1")
    assert "stolen" not in str(disk.tree(root))


def test_a_file_that_may_not_be_read_is_refused(
    root: Path, tmp_path: Path, notebook: Any, monkeypatch: pytest.MonkeyPatch, disk: Any
) -> None:
    source = disk.write(tmp_path / "in", {"ok/toy.ipynb": notebook(), "shut/toy.ipynb": notebook()})
    open_file = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if "shut" in str(path):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert reasons(collect(root, "01_toy", source)) == {"ok": "", "shut": "the file cannot be read: Permission denied"}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_in_a_zip_decide_nothing_but_whose_it_is(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    device = zipfile.ZipInfo("device/toy.ipynb")
    device.external_attr = (stat.S_IFCHR | 0o666) << 16
    path = disk.zipped(
        tmp_path / "in.zip",
        [
            ("in/ok/toy.ipynb", notebook()), ("in/../../out/toy.ipynb", notebook()), ("in/con/toy.ipynb", notebook()),
            ("in/windows\\toy.ipynb", notebook()), ("in/Zoë/toy.ipynb", notebook()),
            ("in/" + "l" * 300 + "/toy.ipynb", notebook()),
            ("in/twice/toy.ipynb", notebook("old")), ("in/twice/toy.ipynb", notebook("new")),
            ("in/Ada/toy.ipynb", notebook("upper")), ("in/ada/toy.ipynb", notebook("lower")),
        ],
    )  # fmt: skip
    done = collect(root, "01_toy", path)
    said = reasons(done)
    assert "outside its folder" in said["out"]
    assert sum(1 for reason in said.values() if reason) == 1
    assert len(said) == 9
    assert len({student.casefold() for student in said}) == 9
    assert disk.answer(root, "twice") == "new"
    assert disk.answer(root, "Ada") == "upper"
    assert all(len(student) < 80 and student.isascii() for student in said)
    assert {path.name for path in tmp_path.iterdir()} == {"course", "in.zip"}
    absolute = disk.zipped(
        tmp_path / "in2.zip", [("/etc/toy.ipynb", notebook()), ("C:/x/toy.ipynb", notebook()), (device, b"")]
    )
    assert all(reasons(collect(root, "01_toy", absolute)).values())


def test_names_of_old_zip_programs_are_read(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    path = disk.zipped(tmp_path / "in.zip", [("Zo__/toy.ipynb", notebook()), ("M_ller/toy.ipynb", notebook())])
    raw = path.read_bytes().replace(b"Zo__", "Zoë".encode()).replace(b"M_ller", "Müller".encode("cp437"))
    path.write_bytes(raw)
    done = collect(root, "01_toy", path)
    assert sorted(student.split("-")[0] for student in reasons(done)) == ["Muller", "Zoe"]


def test_an_encrypted_or_damaged_entry_is_refused_and_the_others_are_taken(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    path = disk.zipped(
        tmp_path / "in.zip", [(f"{name}/toy.ipynb", notebook(name)) for name in ("aa", "locked", "broken")]
    )
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        broken = archive.getinfo("broken/toy.ipynb").header_offset + 60
    central = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"locked/toy.ipynb"))
    raw[central + 8] |= 1
    raw[broken : broken + 20] = bytes(20)
    path.write_bytes(raw)
    said = reasons(collect(root, "01_toy", path))
    assert said["aa"] == ""
    assert "encrypted" in said["locked"]
    assert "damaged" in said["broken"]


def test_what_is_no_folder_and_no_zip_stops_with_a_sentence(root: Path, tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"no zip")
    (tmp_path / "empty").mkdir()
    for path, words in (("x.zip", "neither a folder nor"), ("gone", "does not exist"), ("empty", "no notebook in")):
        with pytest.raises(CourseError, match=words):
            collect(root, "01_toy", tmp_path / path)
    with pytest.raises(CourseError, match="not released"):
        collect(root, "02_kv_cache", tmp_path / "empty")


def test_a_roster_turns_what_an_lms_calls_people_into_their_ids(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    ada = Student("ada", "Ada", "Lovelace", "ada@x.example", {"canvas_id": "1001"})
    twins = [Student(f"li{n}", "Bo", "Li", f"li{n}@x.example") for n in (1, 2)]
    save_roster(root, Roster({s.id: s for s in (ada, *twins, Student("idle"))}))
    names = ["lovelaceada_1001_1_toy.ipynb", "libo_7_2_toy.ipynb", "libo_8_3_toy.ipynb", "who_9_4_toy.ipynb"]
    done = collect(root, "01_toy", disk.zipped(tmp_path / "c.zip", [(name, notebook(name[:9])) for name in names]))
    assert sorted(reasons(done)) == ["7", "8", "9", "ada"]
    assert done.unknown == {"7": "libo", "8": "libo", "9": "who"}
    assert done.missing == ["idle", "li1", "li2"]
    moodle = {
        f"{name}_assignsubmission_file/toy.ipynb": notebook(name) for name in ("Ada Lovelace_5", "Bo Li_6", "Bo Li_7")
    }
    done = collect(root, "01_toy", disk.write(tmp_path / "m", moodle))
    assert sorted(reasons(done)) == sorted(["ada", *(i for i in done.unknown)])
    assert len(done.unknown) == 2
    assert disk.answer(root, "ada") == "Ada Lovelace_5"


def test_two_people_who_fit_one_student_do_not_share_a_folder(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    save_roster(root, Roster({"ada": Student("ada", email="ada@x.example")}))
    files = {f"{name}/toy.ipynb": notebook(name) for name in ("Ada", "ada", "ada@x.example")}
    done = collect(root, "01_toy", disk.write(tmp_path / "in", files))
    assert len(reasons(done)) == 3
    assert disk.answer(root, "ada") == "ada"


def test_a_group_of_gradescope_gets_one_submission_each(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    metadata = (
        b"submission_1:\n  :submitters:\n  - {':sid': '7'}\n  - {':sid': '8'}\n  :created_at: 2026-11-01 10:00:00 Z\n"
    )
    files = {"submission_1/toy.ipynb": notebook("shared"), "submission_metadata.yml": metadata}
    done = collect(root, "01_toy", disk.write(tmp_path / "in", files))
    assert notes(done) == {"7": "handed in by a group of 2", "8": "handed in by a group of 2"}
    assert disk.record(root, "8")["time"] == "2026-11-01T10:00:00+00:00"


def test_a_file_is_read_only_when_it_is_its_students_turn(
    root: Path, tmp_path: Path, notebook: Any, monkeypatch: pytest.MonkeyPatch, disk: Any
) -> None:
    from grader.submissions import collect as module

    files = [(f"s{n}/toy.ipynb", notebook(f"n = {n}")) for n in range(5)]
    path = disk.zipped(tmp_path / "in.zip", list(files))
    events: list[str] = []
    opened, received = zipfile.ZipFile.open, module.receive
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *a, **k: events.append("read") or opened(*a, **k))
    monkeypatch.setattr(module, "receive", lambda *a: events.append("received") or received(*a))
    collect(root, "01_toy", path)
    assert events == ["read", "received"] * 5


def test_a_class_of_five_hundred_takes_little_memory(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    import tracemalloc

    raw = notebook().replace(b'"outputs": []', b'"outputs": ["' + b"x" * 300_000 + b'"]', 1)
    path = disk.zipped(tmp_path / "in.zip", [(f"s{n}/toy.ipynb", raw) for n in range(100)])
    tracemalloc.start()
    collect(root, "01_toy", path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(raw)  # all hundred would be a hundred times
