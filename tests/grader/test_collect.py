"""Collecting: what a class hands in ends as one clean notebook per student, or as a recorded refusal."""

from __future__ import annotations

import io
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


def test_a_file_that_names_no_student_is_asked_for(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    source = disk.write(tmp_path / "in", {"Ada L - toy.ipynb": notebook("a = 1"), "toy (1).ipynb": notebook("b = 1")})
    with pytest.raises(CourseError, match=r'toy \(1\).ipynb names no student: --whose "toy \(1\).ipynb=STUDENT"'):
        collect(root, "01_toy", source)
    done = collect(root, "01_toy", source, whose={"toy (1).ipynb": "bob"})
    assert sorted(reasons(done).values()) == ["", ""]
    assert disk.answer(root, "bob") == "b = 1"
    [other] = {one.student for one in done.received} - {"bob"}
    assert (done.unknown[other], disk.answer(root, other)) == ("Ada L", "a = 1")


@pytest.mark.parametrize("packed", [False, True])
def test_who_handed_in_only_what_is_hidden_is_named_with_the_reason(
    root: Path, tmp_path: Path, notebook: Any, disk: Any, packed: bool
) -> None:
    files = {
        "a/toy.ipynb": notebook(), "a/.ipynb_checkpoints/toy-checkpoint.ipynb": notebook(), "a/._toy.ipynb": b"x",
        "a/.draft.ipynb": notebook(), "b/.ipynb_checkpoints/toy-checkpoint.ipynb": notebook(),
        ".c/toy.ipynb": notebook(), "__MACOSX/._toy.ipynb": b"x",
    }  # fmt: skip
    source = disk.write(tmp_path / "in", files)
    if packed:
        source = tmp_path / "in.zip"
        with zipfile.ZipFile(source, "w") as archive:
            for name, raw in files.items():
                archive.writestr(name, raw)
    done = collect(root, "01_toy", source)
    assert reasons(done) == {"a": ""}
    assert [warning.split(": ")[:2] for warning in done.warnings] == [
        [".c", "hidden, its name begins with a dot"],
        ["b/.ipynb_checkpoints", "only the copy that Jupyter keeps of a notebook"],
    ]
    only = disk.write(tmp_path / "only", {".c/toy.ipynb": notebook()})
    with pytest.raises(CourseError, match=r"no notebook in .*\n\.c: hidden"):
        collect(root, "01_toy", only)


def test_what_is_of_another_lab_of_the_course_is_not_called_nobodys(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    (root / "labs" / "02_other").mkdir()
    files = {"a/01_toy/toy.ipynb": notebook(), "a/02_other/other.ipynb": notebook(), "notes.txt": b"x"}
    done = collect(root, "01_toy", disk.write(tmp_path / "in", files))
    assert ([one.student for one in done.received], done.of_other_labs) == (["a"], ["a/02_other"])
    assert list(map(str, done.ignored)) == ["notes.txt"]


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


def hostile(notebook: Any, release_text: str) -> dict[str, bytes]:
    """Files that a parser, a pattern or a stack may break at."""
    size = 3 << 20
    cells = json.loads(release_text)

    def added(source: str) -> bytes:
        cell = {"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        return json.dumps(cells | {"cells": [*cells["cells"], cell]}).encode()

    sources = {
        "attributes": "x" + ".a" * 100_000, "digits": "x = " + "9" * 5000, "minus": "-" * 100_000 + "1",
        "brackets": "(" * 100_000, "if": "\n".join("\t" * n + "if 1:" for n in range(400)), "null": "x = '\0'",
        "surrogate": "\ud800", "bidi": "\u202e\u2066x", "nested": "[" * 600 + "]" * 600,
    }  # fmt: skip
    return {
        "open": b"[" * size, "closed": b"[" * (size // 2) + b"]" * (size // 2), "quotes": b'["' * (size // 2),
        "escapes": b"[" * (1 << 21) + b'\\"' * (size // 2), "escaped": b'"' + b'\\"' * (size // 2) + b"[" * (1 << 21),
        "number": b'{"cells":[' + b"1" * size + b"]}", "exponent": b'{"cells":[1e' + b"9" * size + b"]}",
        "nulls": bytes(size), "latin": b"\xff" * size, "deep": b'{"a":' * 100_000, "utf16": b"\xff\xfe" + b"[" * size,
        "list": b"[]", "table": b'{"cells":{}}', "mixed": b'{"cells":[1,null,"x",[],{}]}',
        "types": b'{"cells":[{"cell_type":[],"source":["a"],"metadata":{"nbgrader":{"grade_id":[]}},"id":{}}]}',
        "version": notebook().replace(b'"nbformat": 4', b'"nbformat": ' + b"4" * 5000),
        **{f"code-{name}": added(source) for name, source in sources.items()},
    }  # fmt: skip


def test_no_submission_stops_the_others(
    root: Path, tmp_path: Path, notebook: Any, release_text: str, disk: Any
) -> None:
    bad = hostile(notebook, release_text)
    files = {f"{name}/toy.ipynb": raw for name, raw in bad.items()} | {"zoe/toy.ipynb": notebook("mine = 1")}
    done = collect(root, "01_toy", disk.write(tmp_path / "in", files))
    said = reasons(done)
    assert said.keys() == {*bad, "zoe"}
    assert disk.answer(root, "zoe") == "mine = 1"
    taken = {name for name, reason in said.items() if not reason}
    assert taken == {"zoe", "version", "types", *(name for name in bad if name.startswith("code-"))}
    for name in said:
        assert disk.record(root, name)["refused"] == said[name]


def test_a_fault_of_ours_refuses_one_submission_and_no_other(
    root: Path, tmp_path: Path, notebook: Any, monkeypatch: pytest.MonkeyPatch, disk: Any
) -> None:
    from grader.submissions import choice as module

    choose = module.choose

    def fails(files: Any, *rest: Any, **more: Any) -> Any:
        if b"bad" in files[0][1].read():
            raise RecursionError("maximum recursion depth exceeded")
        return choose(files, *rest, **more)

    monkeypatch.setattr(module, "choose", fails)
    first = {f"{student}/toy.ipynb": notebook("good = 1") for student in "ac"}
    collect(root, "01_toy", disk.write(tmp_path / "in", first))
    second = {f"{student}/toy.ipynb": notebook("bad = 1" if student in "ab" else "good = 2") for student in "abc"}
    done = collect(root, "01_toy", disk.write(tmp_path / "in", second), allow=lambda doubts: False)
    assert done.kept == {"a": "the file could not be read: RecursionError"}
    assert reasons(done) == {"b": "the file could not be read: RecursionError", "c": ""}
    assert [disk.answer(root, student) for student in "ac"] == ["good = 1", "good = 2"]


def test_a_string_that_nothing_ends_is_looked_at_once() -> None:
    """Where it was no match, the search began anew at each quote: hours for 3 MB of brackets and quotes."""
    from grader.examination.notebook_file import _STRING

    for raw in (b'"\\"\\"\\"', b'"\\"[\\', b'"', b'"\\\\\\"x'):
        assert _STRING.sub(b"", b"[" + raw) == b"["
    assert _STRING.sub(b"", b'["a\\"b", "c"]') == b"[, ]"


def test_a_student_zip_of_long_names_is_read_in_time(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    name = "a" + "\u0301\u0316" * 10_000  # to order n accents takes n squared steps
    files: list[tuple[Any, bytes]] = [(f"{n}{name}.ipynb", b"") for n in range(200)]
    made = disk.zipped(tmp_path / "a.zip", [*files, ("toy.ipynb", notebook())]).read_bytes()
    assert reasons(collect(root, "01_toy", disk.write(tmp_path / "in", {"ada/toy.zip": made}))) == {"ada": ""}


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


def test_two_claims_to_one_student_stop_with_a_question_and_change_nothing(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    save_roster(root, Roster({"ada": Student("ada", email="ada@x.example")}))
    collect(root, "01_toy", disk.write(tmp_path / "first", {"ada/toy.ipynb": notebook("first")}))
    before = disk.tree(root)
    names = ("Ada/toy.ipynb", "ada/toy.ipynb", "ada@x.example/toy.ipynb", "bob/toy.ipynb", "ada.zip")
    source = disk.write(tmp_path / "in", {name: notebook(name) for name in names})
    with pytest.raises(CourseError) as stopped:
        collect(root, "01_toy", source)
    said = str(stopped.value)
    assert "ada: Ada/toy.ipynb and ada/toy.ipynb and ada.zip and ada@x.example/toy.ipynb" in said
    assert "Nothing was taken in" in said
    after = disk.tree(root)
    after.pop("results/.lock", None)
    before.pop("results/.lock", None)
    assert after == before
    whose = {"Ada": "", "ada.zip": "", "ada@x.example/toy.ipynb": "cy"}
    done = collect(root, "01_toy", source, whose=whose)
    assert sorted(reasons(done)) == ["ada", "bob", "cy"]
    assert (disk.answer(root, "ada"), disk.answer(root, "cy")) == ("ada/toy.ipynb", "ada@x.example/toy.ipynb")
    with pytest.raises(CourseError, match="names no file and no folder in it: eve"):
        collect(root, "01_toy", source, whose={"eve": "ada"})


@pytest.mark.parametrize("twin", ["e\u0301ve", "\u00c9ve", "\u00e9ve"])
def test_two_spellings_of_a_name_are_not_one_student(
    root: Path, tmp_path: Path, notebook: Any, disk: Any, twin: str
) -> None:
    save_roster(root, Roster({"eve": Student("eve", "Éve", "Li")}))
    files = {"\u00e9ve Li/toy.ipynb": notebook("right"), f"{twin} Li .ipynb": notebook("wrong")}
    with pytest.raises(CourseError, match="two claim to be one student"):
        collect(root, "01_toy", disk.write(tmp_path / "in", files))


def test_whose_tells_names_apart_that_look_alike(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    save_roster(root, Roster({"eve": Student("eve", "Éve", "Li")}))
    composed, decomposed = "\u00e9ve Li", "e\u0301ve Li"
    source = disk.write(
        tmp_path / "in", {f"{composed}/toy.ipynb": notebook("right"), f"{decomposed}/toy.ipynb": notebook("wrong")}
    )
    with pytest.raises(CourseError) as stopped:
        collect(root, "01_toy", source)
    assert r"e\u0301ve Li/toy.ipynb" in str(stopped.value)
    assert r"\xe9ve Li/toy.ipynb" in str(stopped.value)
    for key, answer in (
        (decomposed, "right"),
        (f"{composed}/toy.ipynb", "wrong"),
        (r"e\u0301ve Li", "right"),
        (r"\xe9ve Li/toy.ipynb", "wrong"),
    ):
        collect(root, "01_toy", source, whose={key: ""})
        assert disk.answer(root, "eve") == answer


def test_whose_never_gives_two_files_by_one_name_that_is_shown(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    """Three spellings of one name are shown alike; what is typed as shown, and is none of them, would mean all."""
    spellings = ("s\u0323\u0307", "s\u0307\u0323", "\u1e61\u0323")
    source = disk.write(tmp_path / "in", {f"{name}/toy.ipynb": notebook(name) for name in spellings})
    for key in ("\u1e69", "\u1e69/toy.ipynb"):
        with pytest.raises(CourseError, match="fits 3 names that look alike") as stopped:
            collect(root, "01_toy", source, whose={key: "ada"})
        assert r"\u1e61\u0323" in str(stopped.value)
    assert not (root / "received" / "ada").exists()


@pytest.mark.parametrize(
    "twin", ["ada\u200b", "ada\u202e", "\ufeffada", "ad\u0430", "ada\u00ad", "\uff41da", "a\u0301da"]
)
def test_who_only_looks_like_a_student_is_somebody_else(
    root: Path, tmp_path: Path, notebook: Any, disk: Any, twin: str
) -> None:
    save_roster(root, Roster({"ada": Student("ada", "Ada", "Lovelace", "ada@x.example")}))
    files = {"ada/toy.ipynb": notebook("right"), f"{twin}/toy.ipynb": notebook("wrong")}
    done = collect(root, "01_toy", disk.write(tmp_path / "in", files))
    assert len(done.received) == 2
    assert disk.answer(root, "ada") == "right"


def test_a_doubtful_name_is_settled_by_the_roster_or_by_the_instructor(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    victim = Student("vera", "Vera", "Vee", ids={"canvas_id": "4242"})
    mallory = Student("mallory", "Mal", "Lory", ids={"canvas_id": "1001"})
    save_roster(root, Roster({"vera": victim, "mallory": mallory}))
    honest = disk.zipped(tmp_path / "a.zip", [("lorymal_1001_55_my_2_1_toy.ipynb", notebook("mine"))])
    assert reasons(collect(root, "01_toy", honest)) == {"mallory": ""}  # there is no student 2
    name = "veevera_4242_1_a_1001_56_toy.ipynb"
    forged = disk.zipped(tmp_path / "b.zip", [(name, notebook("theirs"))])
    with pytest.raises(CourseError, match=r"can be of 4242 \(veevera\) or 1001 \(veevera_4242_1_a\)"):
        collect(root, "01_toy", forged)
    assert not (root / "received" / "vera").exists()
    collect(root, "01_toy", forged, whose={name: "mallory"})
    assert disk.answer(root, "mallory") == "theirs"
    assert not (root / "received" / "vera").exists()


def test_of_several_files_of_canvas_the_newest_counts(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    """Two downloads in one folder: Canvas calls a second file of one name NAME-1, and counts all files up."""
    old, new = notebook("old"), notebook("new")
    files = {
        "a_1_55_toy.ipynb": old, "a_1_160_toy-1.ipynb": new, "c_3_58_kv.ipynb": old, "c_3_161_kv-1.ipynb": new,
        "b_2_99_toy-2.ipynb": new, "b_2_56_toy.ipynb": old, "b_2_57_toy-1.ipynb": old, "d_4_59_toy-3.ipynb": old,
        "d_4_162_toy.ipynb": new,
    }  # fmt: skip
    done = collect(root, "01_toy", disk.write(tmp_path / "in", files))
    assert reasons(done) == dict.fromkeys("1234", "")
    assert {disk.answer(root, student) for student in "1234"} == {"new"}
    older = disk.write(tmp_path / "older", {name: raw for name, raw in files.items() if raw == old})
    assert {one.news for one in collect(root, "01_toy", older).received} == {"older"}
    assert {disk.answer(root, student) for student in "1234"} == {"new"}


def test_what_is_older_or_worse_than_what_is_there_is_asked_about(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    def hand_in(name: str, files: dict[str, bytes], time: float = 1.8e9, **more: Any) -> Collected:
        source = disk.write(tmp_path / name, {f"{student}/toy.ipynb": raw for student, raw in files.items()})
        for path in source.rglob("*.ipynb"):
            os.utime(path, (time, time))
        return collect(root, "01_toy", source, **more)

    asked: list[dict[str, str]] = []

    def refuse(doubts: dict[str, str]) -> bool:
        asked.append(doubts)
        return False

    everybody = "abcde"
    hand_in("first", {student: notebook("first") for student in everybody})
    hand_in("second", {student: notebook("second") for student in everybody}, 1.9e9, allow=refuse)
    assert asked == []
    empty = json.dumps({"cells": [{"cell_type": "code", "source": "x", "metadata": {}}]}).encode()
    worse = {"a": b"{", "b": empty, "c": notebook("first"), "e": notebook("third")}
    done = hand_in("worse", worse, 2e9, allow=refuse)
    assert [one.student for one in done.received] == ["e"]
    assert done.kept == asked[0]
    assert asked[0]["a"].startswith("it would be refused: the file is not a notebook")
    assert asked[0]["b"].startswith("no cell of this lab was found")
    assert asked[0]["c"].startswith("the same file was collected on 2")
    hand_in("older", {"d": notebook("fourth")}, 1.85e9, allow=refuse)
    assert "by the file's own time it is of 2028-08-16" in asked[1]["d"]
    assert [disk.answer(root, student) for student in everybody] == [*["second"] * 4, "third"]
    hand_in("worse", worse, 2e9)
    assert disk.record(root, "a")["refused"]


def test_a_newer_notebook_of_another_name_is_asked_about(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    files = {"a_1_55_toy.ipynb": notebook("old"), "a_1_60_final.ipynb": notebook("new"), "b_2_56_toy.ipynb": notebook()}
    asked: list[dict[str, str]] = []
    source = disk.write(tmp_path / "in", files)
    done = collect(root, "01_toy", source, allow=lambda doubts: bool(asked.append(doubts)))
    assert [one.student for one in done.received] == ["2"]
    assert asked[0]["1"] == "final.ipynb is newer, and holds cells of this lab; toy.ipynb was chosen by its name"


def test_a_chosen_name_does_not_outweigh_a_number(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    save_roster(root, Roster({"vera": Student("vera", "Vera", "Vee", ids={"canvas_id": "4242"})}))
    done = collect(root, "01_toy", disk.zipped(tmp_path / "c.zip", [("veevera_1001_5_toy.ipynb", notebook())]))
    assert done.unknown == {"1001": "veevera"}
    assert done.missing == ["vera"]


def test_a_mailed_folder_is_its_students_whatever_is_in_it(
    root: Path, tmp_path: Path, notebook: Any, disk: Any
) -> None:
    files = {f"mallory/{name}/toy.ipynb": notebook(name) for name in ("vera", "bob")}
    mail = disk.write(tmp_path / "mail", files)
    with pytest.raises(CourseError, match="all of it lies in one folder, mallory"):
        collect(root, "01_toy", mail)
    save_roster(root, Roster({s: Student(s) for s in ("vera", "bob", "mallory")}))
    assert list(reasons(collect(root, "01_toy", mail))) == ["mallory"]


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


def left_out(root: Path, student: str) -> dict[str, bytes]:
    """What is kept of a student's files that do not count, by where it came from."""
    folder = root / "received" / student / "01_toy" / "left_out"
    names = (folder / "names.txt").read_text().splitlines() if folder.exists() else []
    return {path: (folder / name).read_bytes() for name, path in (line.split(": ", 1) for line in names)}


def test_what_is_left_out_stays_in_received(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    """By --whose FILE=, of several files of one student, and where what is there stays."""
    save_roster(root, Roster({"ada": Student("ada")}))
    names = ("ada/toy.ipynb", "ada/old/draft.ipynb", "Ada/toy.ipynb", "x y (1).ipynb")
    files = {name: notebook(name) for name in names}
    source = disk.write(tmp_path / "in", {**files, "ada/data.csv": b"1,2"})
    whose = {"Ada": "", "x y (1).ipynb": ""}
    for _ in range(2):  # once each, however often it is collected
        collect(root, "01_toy", source, whose=whose)
        assert disk.answer(root, "ada") == "ada/toy.ipynb"
        folders = [folder.name for folder in (root / "received").iterdir()]
        kept = {path: raw for student in folders for path, raw in left_out(root, student).items()}
        assert kept == {name: raw for name, raw in files.items() if name != "ada/toy.ipynb"}
        assert left_out(root, "ada").keys() == {"ada/old/draft.ipynb", "Ada/toy.ipynb"}
    other = disk.write(tmp_path / "worse", {"ada/toy.ipynb": b"nothing"})
    collect(root, "01_toy", other, allow=lambda doubts: False)
    assert disk.answer(root, "ada") == "ada/toy.ipynb"
    assert left_out(root, "ada")["ada/toy.ipynb"] == b"nothing"


def test_a_zip_that_counts_is_not_kept_as_left_out(root: Path, tmp_path: Path, notebook: Any, disk: Any) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("toy.ipynb", notebook("mine"))
    collect(root, "01_toy", disk.write(tmp_path / "in", {"ada/toy.zip": packed.getvalue()}))
    assert disk.answer(root, "ada") == "mine"
    assert left_out(root, "ada") == {}
