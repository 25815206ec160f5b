"""Practice and interview without a terminal: what is asked, said, recorded and reported, with a clock of our own."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from grader.quiz import Question, Verdict, load_quiz
from grader.quiz.exam import Exam, judge_texts, report, sit
from grader.quiz.practice import Recorder, practise, say_next
from grader.quiz.question import letter
from grader.quiz.review import Reviews, utc_now
from grader.quiz.screen import Screen

KV = load_quiz("02_kv_cache")
CHOICE, NUMBER, SHORT, ORDER = "cost-without-cache", "bytes-per-token", "speedup-report", "order-of-a-decode-step"


class Clock:
    """A clock that stands still until an answer takes time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Learner:
    """Types what it is given, each after `seconds`; then the input ends. An exception is raised instead of typed."""

    def __init__(self, *lines: str | BaseException, clock: Clock | None = None, seconds: float = 0, width: int = 80):
        self._lines: Iterator[str | BaseException] = iter(lines)
        self._clock, self._seconds = clock, seconds
        self._out = io.StringIO()
        self.screen = Screen(Console(file=self._out, width=width, highlight=False), self._read)

    def _read(self, prompt: str) -> str:
        if self._clock:
            self._clock.now += self._seconds
        line = next(self._lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    @property
    def saw(self) -> str:
        return self._out.getvalue()

    @property
    def flat(self) -> str:
        """What was said, without line breaks."""
        return " ".join(self.saw.split())


class Log(list[tuple[str, bool, float]]):
    def __call__(self, question: Question, verdict: Verdict, seconds: float) -> None:
        self.append((question.key.split("/")[1], verdict.correct, seconds))


def questions(*ids: str) -> list[Question]:
    return [KV.question(id, 3) for id in ids]


def tagged(*ids: str) -> list[tuple[Question, tuple[str, ...]]]:
    return [(question, KV.item(question.id).tags) for question in questions(*ids)]


def right(id: str) -> str:
    question = KV.question(id, 3)
    if question.kind == "numeric":
        return str(question.right)
    return "".join(map(letter, [question.right] if question.kind == "choice" else question.right))


def wrong(id: str) -> str:
    question = KV.question(id, 3)
    assert question.kind == "choice"
    return letter((question.right + 1) % len(question.options))


# ---------------------------------------------------------------- practice


def test_each_answer_is_judged_explained_and_recorded_with_its_time() -> None:
    clock, log = Clock(), Log()
    learner = Learner(right(CHOICE), "1", "s", clock=clock, seconds=7)
    practise(learner.screen, questions(CHOICE, NUMBER), log, clock)
    assert log == [(CHOICE, True, 7), (NUMBER, False, 7)]
    assert "Right." in learner.saw
    assert "Not yet." in learner.saw
    assert KV.question(CHOICE, 3).why in learner.flat
    assert "2 of 2 answered, 1 right at the first try." in learner.saw


def test_a_wrong_choice_names_the_misconception_and_the_right_one() -> None:
    learner = Learner(wrong(CHOICE), wrong(CHOICE))
    practise(learner.screen, questions(CHOICE), Log())
    question = KV.question(CHOICE, 3)
    note = question.notes[(question.right + 1) % len(question.options)]
    assert note in learner.flat
    assert f"Right: {letter(question.right)}) {question.options[question.right]}" in learner.flat


def test_a_wrong_answer_reveals_nothing_before_the_last_try_and_only_the_first_is_recorded() -> None:
    clock, log = Clock(), Log()
    learner = Learner(wrong(CHOICE), right(CHOICE), clock=clock, seconds=7)
    answered = practise(learner.screen, questions(CHOICE), log, clock)
    between = learner.flat.partition("Not yet.")[2].partition("Right.")[0]
    assert between.strip() == "One more try, or s to see the answer."
    assert log == [(CHOICE, False, 7)]
    assert [verdict.correct for _, verdict in answered] == [False]
    assert KV.question(CHOICE, 3).why in learner.flat


@pytest.mark.parametrize("id", [CHOICE, NUMBER, ORDER])
def test_leaving_after_a_wrong_answer_reveals_nothing(id: str) -> None:
    log = Log()
    first = {CHOICE: wrong(CHOICE), NUMBER: "1", ORDER: right(ORDER)[::-1]}[id]
    learner = Learner(first, "q")
    practise(learner.screen, questions(id, "mask-at-decode"), log)
    assert KV.question(id, 3).explained() not in learner.flat
    assert "Right" not in learner.saw
    assert "in place" not in learner.saw
    assert len(log) == 1


def test_partly_right_is_said_as_such() -> None:
    text = right(ORDER)
    learner = Learner(text[1] + text[0] + text[2:], "s")
    practise(learner.screen, questions(ORDER), Log())
    assert "Partly right." in learner.saw
    assert "3 of 5 in place" in learner.flat


def test_what_is_no_answer_is_asked_again_and_help_says_what_can_be_typed() -> None:
    log = Log()
    learner = Learner("?", "", "zz", "many", right(CHOICE))
    practise(learner.screen, questions(CHOICE), log)
    assert learner.saw.count("expected") == 3
    assert "q leaves; what you answered is kept. s skips this one." in learner.flat
    assert log[0][:2] == (CHOICE, True)


@pytest.mark.parametrize("end", ["q", "Q", " q ", EOFError(), KeyboardInterrupt()])
def test_leaving_keeps_what_was_answered(end: str | BaseException) -> None:
    log = Log()
    learner = Learner(right(CHOICE), end)
    practise(learner.screen, questions(CHOICE, NUMBER), log)
    assert [id for id, *_ in log] == [CHOICE]
    assert "1 of 2 answered, 1 right at the first try." in learner.saw


def test_a_skipped_question_is_neither_recorded_nor_explained() -> None:
    log = Log()
    learner = Learner("s", right(CHOICE))
    practise(learner.screen, questions(NUMBER, CHOICE), log)
    assert [id for id, *_ in log] == [CHOICE]
    assert "Computed" not in learner.saw


def test_a_short_answer_is_compared_with_the_model_answer_and_counted_by_its_writer() -> None:
    log = Log()
    learner = Learner("", "passes cost the same", "ab", "s")
    answered = practise(learner.screen, questions(SHORT), log)
    assert answered[0][1].score == 0.5
    assert "type a few words" in learner.saw
    assert (
        learner.saw.index("Type your answer") < learner.saw.index("A model answer") < learner.saw.index("2 of 4 points")
    )
    assert learner.saw.count("A model answer") == 1


@pytest.mark.parametrize("width", [40, 60, 200])
def test_no_line_is_longer_than_the_terminal_and_options_hang(width: int) -> None:
    learner = Learner(*["s"] * 30, width=width)
    practise(learner.screen, KV.draw(3), Log())
    lines = learner.saw.splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line != line.rstrip()]
    if width == 40:
        assert any(line.startswith("     ") for line in lines)


def test_brackets_and_marks_in_a_prompt_are_shown_as_they_are() -> None:
    learner = Learner("s")
    practise(learner.screen, questions("unequal-lengths"), Log())
    assert "[rows, max_len, …]" in learner.flat


def test_answers_that_cannot_be_stored_are_said_once_and_the_quiz_goes_on(tmp_path: Path) -> None:
    learner = Learner(right(CHOICE), wrong("mask-at-decode"), "s")
    record = Recorder(learner.screen, Reviews.load(tmp_path / "file" / "reviews.jsonl"))
    (tmp_path / "file").write_text("")
    assert len(practise(learner.screen, questions(CHOICE, "mask-at-decode"), record)) == 2
    assert learner.saw.count("not stored") == 1


def test_answers_reach_the_log_with_their_seed_and_the_next_review_is_said(tmp_path: Path) -> None:
    reviews = Reviews.load(tmp_path / "reviews.jsonl")
    learner = Learner(right(CHOICE))
    practise(learner.screen, questions(CHOICE), Recorder(learner.screen, reviews))
    say_next(learner.screen, reviews, utc_now())
    stored = Reviews.load(reviews.path).answers
    assert [(a.key, a.verdict, a.seed) for a in stored] == [(f"02_kv_cache/{CHOICE}", "right", 3)]
    assert "Next review: " in learner.saw
    say_next(learner.screen, reviews, reviews.next_due or utc_now())
    assert "Due for review now: 1. Ask for it with: inferlab quiz" in learner.flat


# ---------------------------------------------------------------- interview


def interview(
    *lines: str | BaseException, ids: tuple[str, ...], minutes: float = 10, seconds: float = 30
) -> tuple[Exam, Learner, Log]:
    clock, log = Clock(), Log()
    learner = Learner(*lines, clock=clock, seconds=seconds)
    exam = sit(learner.screen, tagged(*ids), minutes, log, clock)
    assert "Right" not in learner.saw
    assert "Not yet" not in learner.saw
    judge_texts(learner.screen, exam, log)
    report(learner.screen, exam)
    return exam, learner, log


def test_nothing_is_said_before_the_end_and_then_every_wrong_answer_is_explained() -> None:
    ids = (CHOICE, "mask-at-decode", NUMBER)
    exam, learner, log = interview(right(CHOICE), wrong("mask-at-decode"), right(NUMBER), ids=ids)
    assert (exam.ended, exam.score) == ("done", 2)
    assert "The interview is over: 3 of 3 answered in 1:30 min." in learner.flat
    assert "Score: 2 of 3 (67%)" in learner.saw
    question = KV.question("mask-at-decode", 3)
    assert question.notes[(question.right + 1) % 4] in learner.flat
    assert "Wrong or partly right (1)" in learner.saw
    assert "02 The KV cache: 2 of 3" in learner.saw
    assert "mechanism: 1 of 2" in learner.saw
    assert "memory: 1 of 1" in learner.saw
    assert [(id, ok) for id, ok, _ in log] == [(CHOICE, True), ("mask-at-decode", False), (NUMBER, True)]


def test_time_that_runs_out_is_said_and_what_was_not_answered_counts_nothing() -> None:
    ids = (CHOICE, "mask-at-decode", "why-no-mask", NUMBER)
    exam, learner, log = interview(*map(right, ids), ids=ids, minutes=1.2, seconds=30)
    assert (exam.ended, exam.late, exam.score) == ("time", True, 2)
    assert "Time ran out after 1:12 min: 2 of 4 answered" in learner.flat
    assert "Your last answer came after that and does not count." in learner.flat
    assert "Score: 2 of 4 (50%)" in learner.saw
    assert "Not answered: 0 points each (2)" in learner.saw
    assert [id for id, *_ in log] == list(ids[:2])


def test_an_answer_at_the_very_end_of_the_time_counts_and_no_question_follows_it() -> None:
    exam, learner, _ = interview(right(CHOICE), right(NUMBER), ids=(CHOICE, NUMBER), minutes=0.5, seconds=30)
    assert (exam.ended, exam.late, exam.score) == ("time", False, 1)
    assert "[2/2]" not in learner.saw


def test_the_time_left_is_shown_with_each_question() -> None:
    _, learner, _ = interview(right(CHOICE), right(NUMBER), ids=(CHOICE, NUMBER), minutes=10, seconds=30)
    assert "[1/2] 02 The KV cache · 10:00 min left" in learner.saw
    assert "[2/2] 02 The KV cache · 9:30 min left" in learner.saw


@pytest.mark.parametrize("end", ["q", EOFError(), KeyboardInterrupt()])
def test_an_interview_that_is_left_ends_with_its_report(end: str | BaseException) -> None:
    exam, learner, log = interview(right(CHOICE), end, ids=(CHOICE, NUMBER, "why-no-mask"))
    assert exam.score == 1
    assert "You left early: 1 of 3 answered" in learner.flat
    assert "Score: 1 of 3 (33%)" in learner.saw
    assert "Not answered: 0 points each (2)" in learner.saw
    for id in (NUMBER, "why-no-mask"):
        assert KV.question(id, 3).explained() not in learner.flat, "leaving does not print the answers left"
    assert len(log) == 1


def test_ctrl_c_while_a_question_is_printed_ends_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    show = Screen.show

    def interrupted(self: Screen, question: Question) -> None:
        if question.id == NUMBER:
            raise KeyboardInterrupt
        show(self, question)

    monkeypatch.setattr(Screen, "show", interrupted)
    exam, learner, _ = interview(right(CHOICE), ids=(CHOICE, NUMBER))
    assert (exam.ended, exam.score) == ("cut", 1)
    assert "Score: 1 of 2" in learner.saw


def test_a_skipped_question_counts_nothing_and_is_not_recorded() -> None:
    exam, learner, log = interview("s", right(CHOICE), ids=(NUMBER, CHOICE))
    assert (exam.ended, exam.score) == ("done", 1)
    assert "Not answered: 0 points each (1)" in learner.saw
    assert len(log) == 1


def test_what_was_not_answered_gets_its_answer_and_why() -> None:
    for id in (item.id for item in KV.items):
        exam, learner, _ = interview("s", ids=(id,))
        question = KV.question(id, 3)
        assert exam.entries[0].given is None
        report_text = learner.flat.partition("Not answered")[2]
        assert " ".join(question.explained().split()) in report_text
        for line in question.given_text(question.right) if question.kind not in ("numeric", "short") else ():
            assert " ".join(line.split()) in report_text


def test_a_number_is_asked_for_without_an_example_and_its_forms_are_in_the_help() -> None:
    learner = Learner("?", "many")
    practise(learner.screen, questions(NUMBER), Log())
    before, _, after = learner.flat.partition("? for help")
    assert f"Type a number in {KV.question(NUMBER, 3).unit}." in before
    assert "2e9" not in before
    assert after.count("written like 1234, 12.5 or 2e9") == 2  # the help, and the answer that is no number


def test_texts_are_judged_after_the_time_and_count_then() -> None:
    exam, learner, log = interview("the passes", right(CHOICE), "abcd", ids=(SHORT, CHOICE))
    assert exam.score == 2
    assert "Your answer: the passes" in learner.saw
    assert [id for id, *_ in log] == [CHOICE, SHORT]
    assert log[1][2] == 30


@pytest.mark.parametrize(("end", "asked"), [("q", True), (KeyboardInterrupt(), False)])
def test_a_text_that_nobody_judged_is_shown_and_left_out_of_the_score(end: str | BaseException, asked: bool) -> None:
    exam, learner, _ = interview("my words", right(CHOICE), end, ids=(SHORT, CHOICE, NUMBER))
    assert (exam.score, len(exam.counted)) == (1, 2)
    assert ("Which of these points" in learner.saw) == asked
    assert "Written, but not judged: not in the score (1)" in learner.saw
    assert "Yours: my words" in learner.saw
    assert learner.saw.count("A model answer") == int(asked)  # once where it was to be compared, never on leaving


def test_a_text_that_was_counted_has_its_model_answer_and_points_shown_once() -> None:
    exam, learner, _ = interview("my words", "ab", ids=(SHORT,))
    question = KV.question(SHORT, 3)
    assert exam.score == 0.5
    assert "2 of 4 points." in learner.saw
    assert learner.saw.count("A model answer") == 1
    for i, point in enumerate(question.options):
        assert learner.flat.count(f"{letter(i)}) {point}") == 1


def test_the_report_of_several_chapters_tells_their_tags_apart() -> None:
    clock = Clock()
    learner = Learner(right(CHOICE), right(CHOICE))
    other = KV.model_copy(update={"chapter": "03_batching"}).question(CHOICE, 3)
    exam = sit(learner.screen, [*tagged(CHOICE), (other, ("mechanism",))], 5, Log(), clock)
    report(learner.screen, exam)
    for line in ("02 The KV cache: 1 of 1", "03 ", "02 mechanism: 1 of 1", "03 mechanism: 1 of 1"):
        assert line in learner.saw


def test_an_interview_in_which_nothing_was_answered_still_has_a_report() -> None:
    exam, learner, _ = interview(ids=(CHOICE, NUMBER))
    assert exam.score == 0
    assert "Score: 0 of 2 (0%)" in learner.saw


def each_kind() -> list[str]:
    return [*{item.kind: item.id for item in KV.items if item.kind != "short"}.values(), SHORT]


@pytest.mark.parametrize("answer", [lambda id: right(id) if KV.item(id).kind != "short" else "words", lambda id: "s"])
def test_every_kind_of_item_can_be_in_an_interview(answer: Callable[[str], str]) -> None:
    ids = each_kind()
    points = "abcd"  # of the one short answer, after the time
    exam, _, log = interview(*map(answer, ids), points, ids=tuple(ids))
    assert exam.ended == "done"
    assert (exam.score, len(log)) in ((0, 0), (len(ids), len(ids)))
