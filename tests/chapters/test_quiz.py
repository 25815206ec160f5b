"""Quizzes: computed answers over all ranges, one defensible answer, distractors that stay wrong, safe formulas."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from grader.quiz import (
    Choice,
    Match,
    Multi,
    Numeric,
    Quiz,
    QuizError,
    Short,
    close,
    evaluate,
    load_quiz,
    parse_answer,
    play,
)

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "chapters").glob("[0-9]*/quiz.yaml"))
QUIZZES = {path.parent.name: load_quiz(path.parent.name, path) for path in FILES}
ITEMS = [(slug, item) for slug, quiz in QUIZZES.items() for item in quiz.items]
every_item = pytest.mark.parametrize(("slug", "item"), ITEMS, ids=[f"{slug}-{item.id}" for slug, item in ITEMS])


@every_item
def test_numeric_answers_are_finite_and_mistakes_stay_outside_the_tolerance(slug: str, item: object) -> None:
    if not isinstance(item, Numeric):
        return
    for names in item.every():
        right = float(evaluate(item.answer, names))
        assert math.isfinite(right)
        assert right != 0
        for mistake in item.mistakes:
            wrong = float(evaluate(mistake.value, names))
            assert math.isfinite(wrong)
            assert not close(wrong, right, 2 * item.tolerance), (mistake.misconception, names)


@every_item
def test_options_read_alike_and_none_refers_to_the_others(slug: str, item: object) -> None:
    if not isinstance(item, Choice | Multi):
        return
    for seed in range(5):
        options = item.draw(seed).options
        lengths = [len(option) for option in options]
        assert max(lengths) <= 1.6 * min(lengths), lengths
        for option in options:
            assert not re.search(r"\b(all|none|both|neither) of the (above|others|options)\b", option.lower())


def test_the_right_option_is_not_the_longest_more_often_than_chance_allows() -> None:
    longest = total = 0
    for _, item in ITEMS:
        if isinstance(item, Choice):
            question = item.draw(0)
            longest += max(range(len(question.options)), key=lambda i: len(question.options[i])) == question.right
            total += 1
    assert longest <= total / 2, f"{longest} of {total}"


@every_item
def test_every_source_is_an_item_of_the_coverage_list(slug: str, item: object) -> None:
    known = yaml.safe_load((ROOT / "chapters/coverage.yaml").read_text("utf-8"))["items"]
    for source in item.source:  # type: ignore[attr-defined]
        if re.match(r"\d\d-\d\d$", source):
            assert source in known
            assert source[:2] == slug[:2]
    assert any(re.match(r"\d\d-\d\d$", source) for source in item.source)  # type: ignore[attr-defined]


@every_item
def test_the_right_answer_is_right_and_can_be_typed(slug: str, item: object) -> None:
    for seed in range(3):
        question = item.draw(seed)  # type: ignore[attr-defined]
        assert question == item.draw(seed) or question.prompt == item.draw(seed).prompt  # type: ignore[attr-defined]
        verdict = question.check(question.right)
        assert verdict.correct
        assert verdict.score == 1
        assert question.answer_text()
        assert "{" not in question.as_text() + question.answer_text()
        typed = _typed(question.kind, question.right)
        assert question.check(parse_answer(question, typed)).correct


def _typed(kind: str, right: object) -> str:
    if kind == "numeric":
        return f"{right!r} GB"
    indexes = [right] if isinstance(right, int) else right
    return "".join(chr(97 + i) for i in indexes)  # type: ignore[union-attr, operator]


@every_item
def test_every_wrong_option_is_wrong_and_says_which_misconception_it_is(slug: str, item: object) -> None:
    if isinstance(item, Choice):
        question = item.draw(3)
        for i in range(len(question.options)):
            if i != question.right:
                verdict = question.check(i)
                assert not verdict.correct
                assert len(verdict.message) > len(item.why) * 0.5


def test_a_typed_mistake_is_named() -> None:
    item = QUIZZES["02_kv_cache"].item("bytes-per-token")
    assert isinstance(item, Numeric)
    question = item.draw(1)
    assert (
        "query heads"
        in question.check(float(question.right) * 4).message + question.check(float(question.right) * 8).message
    )


# ---------------------------------------------------------------- the model


def item(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "id": "an-item",
        "kind": "choice",
        "difficulty": 1,
        "tags": ["t"],
        "source": ["02-01"],
        "prompt": "What?",
        "why": "So.",
        "reviewed": "2026-11-20",
        "options": [
            {"text": "one", "right": True},
            {"text": "two", "misconception": "no"},
            {"text": "six", "misconception": "no"},
        ],
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def quiz_file(tmp_path: Path, *items: dict[str, object]) -> Path:
    path = tmp_path / "quiz.yaml"
    path.write_text(yaml.safe_dump({"chapter": "02_kv_cache", "items": list(items)}), "utf-8")
    return path


def loaded(tmp_path: Path, *items: dict[str, object]) -> Quiz:
    return load_quiz("02_kv_cache", quiz_file(tmp_path, *items))


def right(text: str) -> dict[str, object]:
    return {"text": text, "right": True}


def wrong(text: str) -> dict[str, object]:
    return {"text": text, "misconception": "no"}


NUMERIC: dict[str, object] = {
    "kind": "numeric", "options": None, "reviewed": None, "params": {"n": [1, 2]}, "answer": "2 * n", "unit": "GB",
    "tolerance": 0.01, "mistakes": [{"misconception": "halving", "value": "n / 2"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "Not An Id"}, "id"),
        ({"difficulty": 4}, "difficulty"),
        ({"source": []}, "source"),
        ({"reviewed": None}, "reviewed"),
        ({"unknown": 1}, "unknown"),
        ({"options": [right("a"), right("b"), wrong("c")]}, "one right"),
        ({"options": [right("a"), {"text": "b"}, wrong("c")]}, "misconception"),
        ({"options": [right("a"), wrong("a"), wrong("c")]}, "same"),
        ({"prompt": "How many {n}?"}, "neither"),
        (NUMERIC | {"answer": "2 * m"}, "unknown name"),
        (NUMERIC | {"mistakes": []}, "mistakes"),
        (NUMERIC | {"answer": "2 * n", "tolerance": 0.5}, "tolerance"),
        ({"kind": "match", "options": None, "pairs": [["a", "x"], ["b", "x"], ["c", "y"]]}, "once"),
        ({"kind": "riddle"}, "kind"),
    ],
)  # fmt: skip
def test_a_wrong_item_is_refused_with_a_message(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(QuizError, match=message):
        loaded(tmp_path, item(**changes))


def test_ids_are_unique_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QuizError, match="twice"):
        loaded(tmp_path, item(), item())
    with pytest.raises(QuizError, match="an-item"):
        loaded(tmp_path, item()).item("other")


@pytest.mark.parametrize("text", ["", "chapter: [", "chapter: 02_kv_cache\nitems: []"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "quiz.yaml").write_text(text, "utf-8")
    with pytest.raises(QuizError, match=r"quiz\.yaml"):
        load_quiz("02_kv_cache", tmp_path / "quiz.yaml")


# ---------------------------------------------------------------- expressions


def test_expressions_reach_theory() -> None:
    names = {"shape": evaluate('model_shapes.model("llama-3-70b")', {})}
    assert evaluate("kv_cache.bytes_per_token(shape)", names) == 327_680
    assert evaluate("kv_cache.cache_bytes(shape, tokens=8192) / units.GB", names) == pytest.approx(2.684354560)
    assert evaluate("-floor(7 / 2) + max(1, 2)", {}) == -1


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')", "open('x')", "units.__class__", "kv_cache.np", "kv_cache.np.load", "(lambda: 1)()",
        "[x for x in range(9)]", "units.math", "hardware.dataclass", "shape.__init__", "'a'.format", "2 ** 9999",
        "max(**units.KB)", "units.GB if 1 == 1 else 2", "units.nothing", "kv_cache",
        "kv_cache.bytes_per_token.__globals__", "latency.generation_cost.__code__", "1 +",
    ],
)  # fmt: skip
def test_expressions_reach_nothing_else(expression: str) -> None:
    shape = evaluate('model_shapes.model("llama-3-8b")', {})
    if expression == "kv_cache":
        assert evaluate(expression, {}).__name__ == "reference_impl.theory.kv_cache"
        return
    with pytest.raises(QuizError):
        evaluate(expression, {"shape": shape})


def test_large_ranges_are_sampled_with_their_corners(tmp_path: Path) -> None:
    span = {"low": 1, "high": 1000}
    quiz = loaded(tmp_path, item(**(NUMERIC | {"params": {"n": span, "m": span}, "answer": "n + m + 5"})))
    draws = [(names["n"], names["m"]) for names in quiz.items[0].every(limit=100)]
    assert {(1, 1), (1, 1000), (1000, 1), (1000, 1000)} <= set(draws)
    assert len(draws) == 104


# ---------------------------------------------------------------- playing


def test_the_quiz_can_be_played_as_text() -> None:
    questions = QUIZZES["02_kv_cache"].draw(seed=5)
    said: list[str] = []

    def replies() -> Iterator[str]:
        for question in questions:
            if question.kind == "short":
                yield "in my own words"
            if question.kind == "numeric":
                yield "many"
            yield _typed(question.kind, question.right)

    source = replies()
    assert play(questions, ask=lambda _: next(source), say=said.append) == 1.0
    assert any("expected a number" in line for line in said)
    assert sum("Right." in line for line in said) == len(questions)


def test_a_wrong_answer_scores_less_and_explains() -> None:
    quiz = QUIZZES["02_kv_cache"]
    question = quiz.item("formula-terms").draw(0)
    rotated = [question.right[-1], *question.right[:-1]]
    verdict = question.check(rotated)
    assert not verdict.correct
    assert verdict.score < 1
    assert "0 of 5" in verdict.message
    several = quiz.item("what-is-saved").draw(0)
    assert several.check(set()).score == 0.5
    points = quiz.item("speedup-report").draw(0)
    assert points.check({0}).score == 0.25


@pytest.mark.parametrize("text", ["", "z", "1", "ab"])
def test_a_typed_answer_that_is_none_is_refused(text: str) -> None:
    question = QUIZZES["02_kv_cache"].item("cost-without-cache").draw(0)
    with pytest.raises(ValueError, match="expected"):
        parse_answer(question, text)


def test_draws_differ_by_seed_and_tags_select() -> None:
    quiz = QUIZZES["02_kv_cache"]
    assert len({quiz.item("bytes-per-token").draw(seed).prompt for seed in range(20)}) > 5
    tagged = [question.id for question in quiz.draw(tag="requests")]
    assert tagged == [i.id for i in quiz.items if "requests" in i.tags]


def test_kinds_of_the_model_are_all_used_somewhere() -> None:
    assert {type(i) for _, i in ITEMS} >= {Choice, Multi, Numeric, Match, Short}
