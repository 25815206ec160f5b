"""`inferlab quiz` as its user runs it: in a pseudo-terminal, in a pipe, with wrong arguments, without input."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from grader.quiz import load_quiz
from grader.quiz.question import letter
from grader.quiz.quizzes import open_quizzes
from grader.quiz.review import Reviews
from tests.warm import Warm

KV = load_quiz("02_kv_cache")
MAIN = "from grader.cli import main; main()"
COMMAND = [sys.executable, "-P", "-c", MAIN, "quiz"]
# A fork has the objects that its parent made for other files: it makes its own for the pipes that it was given.
STREAMS = (
    "import sys; sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate('rww'))"
)
COUNT = len(KV.draw(tag="requests"))  # three, and at most one of them wants a number
ESCAPE = "\x1b["


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def environment(data: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return clean | {"INFERLAB_DATA": str(data), "TERM": "xterm-256color", "LANG": "C.UTF-8", **more}


Pipe = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def pipe(warm: Warm) -> Pipe:
    """pipe(data, *arguments): the command with `typed` as its input, in a fork of a Python that has imported what it
    needs of others; in one of its own, as a terminal has it, where `cold`."""

    def run(
        data: Path, *arguments: str, typed: str = "", cold: bool = False, **more: str
    ) -> subprocess.CompletedProcess[str]:
        command = COMMAND if cold else warm.command(["-c", f"{STREAMS}\n{MAIN}", "quiz"])
        return subprocess.run(
            [*command, *arguments], input=typed, env=environment(data, **more), capture_output=True, text=True,
            timeout=600,
        )  # fmt: skip

    return run


def terminal(data: Path, *arguments: str, columns: int = 60, **more: str) -> pexpect.spawn:
    return pexpect.spawn(
        COMMAND[0], [*COMMAND[1:], *arguments],
        env=environment(data, **more), dimensions=(24, columns), encoding="utf-8", timeout=600,
    )  # fmt: skip


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def finish(child: pexpect.spawn) -> str:
    """What came until the program ended; it has to end well."""
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, child.before
    return str(child.before)


def first(seed: int = 3, tag: str = "requests") -> str:
    """The right letter of the first question drawn."""
    question = KV.draw(seed, tag)[0]
    assert question.kind == "choice"
    return letter(question.right)


# ---------------------------------------------------------------- a terminal


def test_in_a_terminal_a_chapter_is_asked_in_colour_and_leaves_at_q(data: Path) -> None:
    child = terminal(data, "02", "--tag", "requests", "--seed", "3")
    child.expect_exact("> ")
    shown = child.before
    assert ESCAPE in shown
    assert max(map(len, plain(shown).split("\n"))) <= 60
    child.sendline("?")
    child.expect_exact("q leaves")
    child.sendline(first())
    child.expect_exact("Right.")
    child.expect_exact("> ")
    child.sendline("q")
    assert f"1 of {COUNT} answered, 1 right at the first try." in plain(finish(child))
    assert len(Reviews.load(data / "reviews.jsonl").answers) == 1


def test_no_color_means_no_colour(data: Path) -> None:
    child = terminal(data, "02", "--tag", "requests", "--seed", "3", NO_COLOR="1")
    child.expect_exact("> ")
    child.sendline(first())
    child.expect_exact("> ")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", child.before)
    child.sendeof()
    finish(child)


@pytest.mark.parametrize("leave", ["eof", "interrupt", "hang up"])
def test_an_interview_that_is_broken_off_reports_and_keeps_what_was_answered(data: Path, leave: str) -> None:
    child = terminal(data, "02", "--interview", "--minutes", "5", "--tag", "requests", "--seed", "3")
    for _ in range(COUNT - 1):
        child.expect_exact("> ")
        child.sendline("s" if "a)" not in child.before else "a")
    child.expect_exact("> ")
    if leave == "hang up":
        child.kill(signal.SIGHUP)
        child.wait()
    else:
        child.sendeof() if leave == "eof" else child.sendintr()
        if leave == "interrupt":  # one that comes between the prompt and the reading is seen when the reading ends
            child.sendline("")
        report = plain(finish(child))
        assert "You left early: " in report
        assert re.search(rf"Score: \d of {COUNT}", report)
        assert "Not answered: 0 points each" in report
    answers = Reviews.load(data / "reviews.jsonl").answers
    assert answers
    assert all(answer.key.startswith("02_kv_cache/") for answer in answers)


# ---------------------------------------------------------------- a pipe


def test_in_a_pipe_everything_is_plain_text_and_what_was_typed_is_in_it(data: Path, pipe: Pipe) -> None:
    result = pipe(data, "02", "--tag", "requests", "--seed", "3", typed=f"{first()}\ns\n", COLUMNS="60")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert f"\n> {first()}\nRight.\n" in result.stdout
    assert "Skipped." in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 60
    assert f"1 of {COUNT} answered" in result.stdout
    assert "Next review" in result.stdout


def test_no_input_at_all_is_no_error(data: Path, pipe: Pipe) -> None:
    result = pipe(data, "02")
    assert result.returncode == 0
    assert f"0 of {len(KV.items)} answered" in result.stdout
    assert not data.exists()


def test_a_terminal_that_knows_only_ascii_shows_question_marks(data: Path, pipe: Pipe) -> None:
    result = pipe(data, "02", "--seed", "3", cold=True, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LANG="C")
    assert result.returncode == 0, result.stderr
    assert "T?(S+T)" in result.stdout


def test_the_same_seed_asks_the_same_and_none_draws_anew(data: Path, pipe: Pipe) -> None:
    shown = [pipe(data, "02", "--tag", "memory", "--seed", seed, typed="s\n" * 30).stdout for seed in ("5", "5", "6")]
    assert shown[0] == shown[1] != shown[2]
    assert pipe(data, "02", typed="s\n" * 30).stdout != pipe(data, "02", typed="s\n" * 30).stdout


def test_what_is_due_is_asked_with_new_numbers_most_urgent_first(data: Path, pipe: Pipe) -> None:
    assert "you have not answered any question yet" in pipe(data).stdout
    same = {"v": 1, "score": 0, "seed": 1, "seconds": 1}
    rows = [("max-context", 3, "right"), ("bytes-per-token", 1, "wrong"), ("removed-item", 1, "wrong")]
    data.mkdir()
    with (data / "reviews.jsonl").open("w") as file:
        for id, day, verdict in rows:
            entry = {"key": f"02_kv_cache/{id}", "time": f"2026-01-0{day}T00:00:00+00:00", "verdict": verdict}
            file.write("\n" + json.dumps(same | entry))
    result = pipe(data, typed="1\ns\n1\ns\n")
    assert (
        result.stdout.index("[1/2]")
        < result.stdout.index("KV heads and a head dimension")
        < result.stdout.index("[2/2]")
    )
    answers = Reviews.load(data / "reviews.jsonl").answers
    assert [answer.key for answer in answers[-2:]] == ["02_kv_cache/bytes-per-token", "02_kv_cache/max-context"]
    again = pipe(data).stdout
    assert "Nothing is due for review." in again
    assert "Due for review now" not in again  # the item that is gone from its quiz


def test_an_interview_over_all_chapters_names_its_seed(data: Path, pipe: Pipe) -> None:
    result = pipe(data, "--interview", "--minutes", "6", typed="s\n" * 20)
    said = " ".join(result.stdout.split())
    written = ", ".join(quiz.chapter[:2] for quiz in open_quizzes())
    assert re.search(r"Interview: \d+ questions in 6 minutes \(seed \d+\)", said)
    assert f"Drawn from every chapter of the course that is written ({written})" in said
    assert "The interview is over: 0 of" in result.stdout


def test_one_question_in_one_minute_is_said_in_the_singular(data: Path, pipe: Pipe) -> None:
    said = " ".join(
        pipe(data, "02", "--interview", "--minutes", "1", "--tag", "requests", "--seed", "3").stdout.split()
    )
    assert re.search(r"Interview: 1 question in 1 minute \(seed 3\)\. Drawn from chapter 02\.", said)


def test_damaged_lines_are_said_and_the_quiz_goes_on(data: Path, pipe: Pipe) -> None:
    data.mkdir()
    (data / "reviews.jsonl").write_bytes(b"\xff\x00 not a line")
    result = pipe(data, "02")
    assert result.returncode == 0
    assert "1 damaged line was left out" in " ".join(result.stdout.split())


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("77",), "There are quizzes for"),
        (("02", "--tag", "none-such"), "there are mechanism, memory, requests"),
        (("--minutes", "10"), "inferlab quiz --interview --minutes 10"),
        (("export",), "--html quiz.html"),
        (("export", "02", "--html", "/dev/null/quiz.html"), "/dev/null is a file and no folder"),
    ],
)
def test_an_error_says_what_to_do_and_is_no_success(
    data: Path, pipe: Pipe, arguments: tuple[str, ...], message: str
) -> None:
    result = pipe(data, *arguments)
    typed_wrongly = arguments in (("export",), ("--minutes", "10"))
    assert result.returncode == (2 if typed_wrongly else 1)
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_log_of_a_newer_version_stops_before_the_first_question(data: Path, pipe: Pipe) -> None:
    data.mkdir()
    (data / "reviews.jsonl").write_text('\n{"v": 99}')
    result = pipe(data, "02")
    assert (result.returncode, result.stdout) == (1, "")
    assert "pip install --upgrade inferlab" in result.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("ask", "--help"), ("export", "--help"), ("02", "--help")])
def test_help_has_an_example_of_every_way(data: Path, pipe: Pipe, arguments: tuple[str, ...]) -> None:
    result = pipe(data, *arguments)
    assert result.returncode == 0
    assert "Example" in result.stdout
    assert "inferlab quiz" in result.stdout
