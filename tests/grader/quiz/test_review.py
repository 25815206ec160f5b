"""The log of answers survives kills, damage and several writers; what is due follows from it and from nothing else."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader.quiz import Verdict
from grader.quiz.answer_log import append_answer, log_path, read_answers
from grader.quiz.review import Answer, ReviewError, Reviews, grade, record_answer

START = datetime(2026, 11, 1, 20, tzinfo=UTC)
RIGHT, PARTLY, WRONG = Verdict(True, 1.0, ""), Verdict(False, 0.6, ""), Verdict(False, 0.0, "")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "data" / "reviews.jsonl"


def days(count: float) -> datetime:
    return START + timedelta(days=count)


def answers(path: Path) -> list[Answer]:
    return read_answers(path)[0]


# ---------------------------------------------------------------- the file

ANSWERS = st.lists(
    st.builds(
        Answer,
        key=st.sampled_from(["02_kv_cache/a", "02_kv_cache/b-c", "01_x/a"]),
        time=st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)).map(
            lambda time: time.replace(tzinfo=UTC, fold=0)
        ),
        verdict=st.sampled_from(["wrong", "partly", "right"]),
        score=st.sampled_from([0.0, 0.25, 0.6, 1.0]),
        seed=st.integers(0, 10**6),
        seconds=st.sampled_from([0.0, 1.5, 3600.0]),
    ),
    min_size=1,
    max_size=6,
)


def written(path: Path, items: list[Answer]) -> bytes:
    path.unlink(missing_ok=True)
    for item in items:
        append_answer(item, path)
    return path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(ANSWERS)
def test_what_was_written_is_read_back_by_time(tmp_path_factory: pytest.TempPathFactory, items: list[Answer]) -> None:
    path = tmp_path_factory.mktemp("log") / "reviews.jsonl"
    written(path, items)
    assert read_answers(path) == (sorted(items, key=lambda item: item.time), 0)
    by_hand = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    assert [entry["key"] for entry in by_hand] == [item.key for item in items]


@settings(max_examples=60, deadline=None)
@given(ANSWERS, ANSWERS, st.data())
def test_a_kill_at_any_byte_costs_at_most_the_answer_being_written(
    tmp_path_factory: pytest.TempPathFactory, before: list[Answer], after: list[Answer], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "reviews.jsonl"
    whole = written(path, before[:-1]) if before[1:] else b""
    full = written(path, before)
    cut = data.draw(st.integers(len(whole), len(full)))
    path.write_bytes(full[:cut])
    for item in after:  # the next player goes on behind it
        append_answer(item, path)
    found, damaged = read_answers(path)
    expected = [*before, *after] if cut == len(full) else [*before[:-1], *after]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert damaged == (cut not in (len(whole), len(whole) + 1, len(full)))


WHOLE = {
    "v": 1, "key": "a/b", "time": "2026-11-20T10:00:00+00:00", "verdict": "right", "score": 1, "seed": 1, "seconds": 1,
}  # fmt: skip


def changed(**changes: object) -> bytes:
    return json.dumps(WHOLE | changes).encode()


DAMAGE = [
    b"\xff\xfe\x00garbage", b"{", b"[]", b"null", b"17", b'"text"', b"[" * 5000, b'{"v": 1}', b'{"v": 1e999}', b"\x00",
    changed(time="yesterday"), changed(time="2026-11-20T10:00:00"), changed(time="9998-11-20T10:00:00+00:00"),
    changed(time=7), changed(verdict="great"), changed(verdict=["right"]), changed(score=7), changed(score=math.nan),
    changed(seconds=-1), changed(seconds=math.inf), changed(seed="x"), changed(key="nothing"), changed(v=None),
]  # fmt: skip


@pytest.mark.parametrize("line", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_line_is_left_out_and_counted(log: Path, line: bytes) -> None:
    record_answer("02_kv_cache/a", RIGHT, seed=1, seconds=2, now=START, path=log)
    with log.open("ab") as file:
        file.write(b"\n" + line)
    record_answer("02_kv_cache/b", WRONG, seed=1, seconds=2, now=START, path=log)
    reviews = Reviews.load(log)
    assert reviews.damaged == 1
    assert reviews.seen == {"02_kv_cache/a", "02_kv_cache/b"}


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_no_content_of_the_file_is_a_crash(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("log") / "reviews.jsonl"
    path.write_bytes(content)
    assert Reviews.load(path).seen == frozenset()


def test_a_file_of_a_newer_version_is_refused_with_what_to_do(log: Path) -> None:
    record_answer("02_kv_cache/a", RIGHT, seed=1, seconds=2, path=log)
    log.write_text(log.read_text().replace('"v": 1', '"v": 2') + '\n{"v": 2, "shape": "unknown"}')
    with pytest.raises(ReviewError, match=r"newer version.*pip install --upgrade inferlab.*INFERLAB_DATA"):
        Reviews.load(log)


def test_no_file_means_nothing_answered_and_none_is_made_by_reading(log: Path) -> None:
    reviews = Reviews.load(log)
    assert (reviews.seen, reviews.due(START), reviews.next_due, reviews.answers) == (frozenset(), [], None, [])
    assert not log.parent.exists()


@pytest.mark.parametrize(
    "make", [lambda p: p.parent.write_text(""), lambda p: p.mkdir(parents=True)], ids=["file", "folder"]
)
def test_a_place_that_cannot_be_written_is_said_and_nothing_changes(log: Path, make: Callable[[Path], None]) -> None:
    reviews = Reviews.load(log)
    make(log)
    with pytest.raises(ReviewError, match="not stored.*INFERLAB_DATA"):
        reviews.record("02_kv_cache/a", RIGHT, seed=1, seconds=2)
    assert reviews.seen == frozenset()


def test_a_full_disk_is_said_and_the_next_answer_is_whole(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:20]))
    with pytest.raises(ReviewError, match="disk is full"):
        record_answer("02_kv_cache/a", RIGHT, seed=1, seconds=2, path=log)
    monkeypatch.setattr(os, "write", write)
    record_answer("02_kv_cache/b", RIGHT, seed=1, seconds=2, path=log)
    assert Reviews.load(log).seen == {"02_kv_cache/b"}


def test_what_could_not_be_read_back_is_not_written(log: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        record_answer("no-chapter", RIGHT, seed=1, seconds=2, path=log)
    assert not log.exists()


def test_the_file_lies_in_the_learners_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "mine"))
    record_answer("02_kv_cache/a", RIGHT, seed=1, seconds=2)
    assert log_path() == tmp_path / "mine" / "reviews.jsonl"
    assert Reviews.load().seen == {"02_kv_cache/a"}


# ---------------------------------------------------------------- several processes

WRITER = """
import sys
from pathlib import Path
from grader.quiz import Verdict
from grader.quiz.review import record_answer
name, count, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for i in range(count):
    record_answer(f"02_kv_cache/{name}-{i}", Verdict(True, 1.0, ""), seed=i, seconds=1.0, path=path)
    print(i, flush=True)
"""


def writer(name: str, count: int, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", WRITER, name, str(count), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_players_that_write_at_the_same_time_lose_nothing(log: Path) -> None:
    processes = [writer(name, 60, log) for name in "abc"]
    for process in processes:
        go(process)
    for process in processes:
        process.communicate(timeout=600)
        assert process.returncode == 0
    reviews = Reviews.load(log)
    assert reviews.damaged == 0
    assert reviews.seen == {f"02_kv_cache/{name}-{i}" for name in "abc" for i in range(60)}


def test_a_player_that_is_killed_loses_no_answer_it_has_acknowledged(log: Path) -> None:
    process, other = writer("a", 10_000, log), writer("b", 40, log)
    go(process)
    go(other)
    assert process.stdout is not None
    for _ in range(25):
        acknowledged = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait(600)
    other.communicate(timeout=600)
    record_answer("02_kv_cache/last", RIGHT, seed=1, seconds=2, path=log)
    reviews = Reviews.load(log)
    wanted = {f"02_kv_cache/a-{i}" for i in range(acknowledged + 1)} | {f"02_kv_cache/b-{i}" for i in range(40)}
    assert wanted | {"02_kv_cache/last"} <= reviews.seen
    assert reviews.damaged <= 1


# ---------------------------------------------------------------- what is due


def test_verdicts_are_graded_by_their_score() -> None:
    assert [grade(v) for v in (RIGHT, PARTLY, WRONG)] == ["right", "partly", "wrong"]
    assert grade(Verdict(False, 0.5, "")) == "partly"
    assert grade(Verdict(False, 0.49, "")) == "wrong"


def test_a_wrong_answer_comes_back_before_a_partly_right_one_and_that_before_a_right_one(log: Path) -> None:
    reviews = Reviews.load(log)
    for name, verdict in (("right", RIGHT), ("partly", PARTLY), ("wrong", WRONG)):
        for day in (0, 2):
            reviews.record(f"02_kv_cache/{name}", verdict, seed=1, seconds=2, now=days(day))
    due = [reviews.due_at(f"02_kv_cache/{name}") for name in ("wrong", "partly", "right")]
    assert due == sorted(due)
    assert len(set(due)) == 3
    assert reviews.next_due == due[0]
    assert reviews.due(days(60)) == [f"02_kv_cache/{name}" for name in ("wrong", "partly", "right")]
    assert reviews.recall("02_kv_cache/wrong", days(10)) < reviews.recall("02_kv_cache/right", days(10))


def test_right_answers_push_the_next_review_further_and_further_away(log: Path) -> None:
    reviews = Reviews.load(log)
    now, gaps = START, []
    for _ in range(4):
        reviews.record("02_kv_cache/a", RIGHT, seed=1, seconds=2, now=now)
        due = reviews.due_at("02_kv_cache/a")
        assert reviews.due(due - timedelta(seconds=1)) == []
        assert reviews.due(due) == ["02_kv_cache/a"]
        gaps.append(due - now)
        now = due
    assert gaps == sorted(gaps)
    assert gaps[3] > 4 * gaps[0]


def test_who_studies_an_hour_earlier_the_next_day_finds_what_was_wrong(log: Path) -> None:
    reviews = Reviews.load(log)
    reviews.record("02_kv_cache/a", WRONG, seed=1, seconds=2, now=START)
    assert reviews.due(START + timedelta(hours=2)) == []
    assert reviews.due(START + timedelta(hours=23)) == ["02_kv_cache/a"]


@settings(max_examples=30, deadline=None)
@given(ANSWERS, st.randoms(use_true_random=False))
def test_the_state_is_a_function_of_the_log_whatever_the_order_of_its_lines(
    tmp_path_factory: pytest.TempPathFactory, items: list[Answer], random: st.random_module
) -> None:
    items = list({item.time: item for item in items}.values())
    path = tmp_path_factory.mktemp("log") / "reviews.jsonl"
    states = []
    for _ in range(2):
        written(path, items)
        reviews = Reviews.load(path)
        states.append({key: (reviews.due_at(key), reviews.recall(key, days(9))) for key in reviews.seen})
        random.shuffle(items)  # type: ignore[attr-defined]
    assert states[0] == states[1]


def test_recording_and_loading_come_to_the_same(log: Path) -> None:
    reviews = Reviews.load(log)
    for day, verdict in enumerate((WRONG, RIGHT, PARTLY, RIGHT)):
        reviews.record("02_kv_cache/a", verdict, seed=day, seconds=2, now=days(3 * day))
    again = Reviews.load(log)
    assert again.answers == reviews.answers
    assert again.due_at("02_kv_cache/a") == reviews.due_at("02_kv_cache/a")
