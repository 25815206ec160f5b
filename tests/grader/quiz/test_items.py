"""The item model: what quiz.yaml may say, how an answer is typed, judged and scored, and what expressions may reach."""

import math
from pathlib import Path

import pytest
import yaml

from grader.quiz import Question, Quiz, QuizError, evaluate, load_quiz, parse_answer
from grader.quiz.expressions import theory_modules
from grader.quiz.quizzes import draw_due, draw_exported, draw_interview, open_quizzes, title

KV = load_quiz("02_kv_cache")


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


def test_every_module_of_theory_can_be_used_without_being_listed() -> None:
    import reference_impl.theory

    folder = Path(reference_impl.theory.__file__).parent
    assert set(theory_modules()) == {path.stem for path in folder.glob("[a-z]*.py")}
    for name in theory_modules():
        assert evaluate(name, {}).__name__ == f"reference_impl.theory.{name}"


# ---------------------------------------------------------------- judging


def test_a_typed_mistake_is_named() -> None:
    question = KV.item("bytes-per-token").draw(1)
    for name, number in question.mistakes:
        verdict = question.check(number)
        assert not verdict.correct
        assert f"by {name}." in verdict.message
    assert "That is the number" not in question.check(1.0).message


def test_parts_of_an_order_or_a_match_score_by_place() -> None:
    question = KV.item("formula-terms").draw(0)
    rotated = [question.right[-1], *question.right[:-1]]
    assert question.check(rotated).score == 0
    assert "0 of 5" in question.check(rotated).message
    swapped = [question.right[1], question.right[0], *question.right[2:]]
    assert question.check(swapped).score == pytest.approx(3 / 5)


def test_ticking_everything_or_half_of_it_earns_what_is_known() -> None:
    question = KV.item("what-is-saved").draw(0)
    right, wrong = set(question.right), set(range(4)) - set(question.right)
    assert len(right) == 2
    assert question.check(right).score == 1
    assert question.check({min(right)}).score == 0.5
    assert question.check({min(right), min(wrong)}).score == 0
    assert question.check(right | wrong).score == 0
    missing = question.check({min(right)}).message
    assert f"Also right: {question.options[max(right)]}" in missing


def test_points_of_a_short_answer_are_counted() -> None:
    question = KV.item("speedup-report").draw(0)
    assert question.check({0}).score == 0.25
    assert question.check(set()).score == 0
    assert question.check({0, 1, 2, 3}).correct
    assert question.explained().startswith("A model answer")


@pytest.mark.parametrize(
    ("id", "given"),
    [
        ("cost-without-cache", None), ("cost-without-cache", 4), ("cost-without-cache", "a"),
        ("what-is-saved", set()), ("what-is-saved", {7}),
        ("formula-terms", [0, 1, 2, 3]), ("formula-terms", [0, 1, 2, 3, None]), ("formula-terms", [0, 0, 1, 2, 3]),
        ("order-of-a-decode-step", [0, 0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused_and_not_judged(id: str, given: object) -> None:
    with pytest.raises(ValueError, match="choose|expected|once"):
        KV.item(id).draw(0).check(given)


# ---------------------------------------------------------------- typing


def number_question(unit: str = "GB") -> Question:
    return Question("n", "numeric", "How many?", (), (), unit, 1.0, lambda given: given)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1234.5", 1234.5), ("1,234.5", 1234.5), ("1 234", 1234), ("327 680 gb", 327680), ("1_000_000", 1e6),
        ("2e9 GB", 2e9), ("-3", -3), (".5", 0.5), ("7GB", 7), ("12,345,678", 12345678), ("  8  ", 8),
    ],
)  # fmt: skip
def test_a_number_can_be_typed_as_people_write_numbers(text: str, value: float) -> None:
    assert parse_answer(number_question(), text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "many",
        "1,5",
        "1,23",
        "12,34,567",
        "2.7 GiB",
        "3 MB",
        "nan",
        "inf",
        "1e999",
        "1/2",
        "3k",
        "1 2",
        "--1",
        "1234,567",
    ],
)
def test_a_number_that_could_mean_another_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a number \(GB\)"):
        parse_answer(number_question(), text)


@pytest.mark.parametrize("text", ["", "z", "1", "ab", "a!", "b and c"])
def test_a_letter_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_answer(KV.item("cost-without-cache").draw(0), text)


def test_letters_can_be_typed_with_commas_and_capitals() -> None:
    assert parse_answer(KV.item("what-is-saved").draw(0), " A, c ") == {0, 2}
    assert parse_answer(KV.item("formula-terms").draw(0), "c b a e d") == [2, 1, 0, 4, 3]
    assert parse_answer(KV.item("cost-without-cache").draw(0), "b)") == 1
    assert parse_answer(KV.item("oom-order").draw(0), "") == set()


# ---------------------------------------------------------------- drawing


def test_draws_differ_by_seed_and_tags_select() -> None:
    assert len({KV.item("bytes-per-token").draw(seed).prompt for seed in range(20)}) > 5
    assert [q.id for q in KV.draw(tag="requests")] == [i.id for i in KV.items if "requests" in i.tags]
    assert KV.draw(seed=7)[0].key == "02_kv_cache/cost-without-cache"
    assert {question.seed for question in KV.draw(seed=7)} == {7}


def test_chapters_are_found_by_number_and_by_folder() -> None:
    for name in ("02", "2", "02_kv_cache"):
        assert [quiz.chapter for quiz in open_quizzes([name])] == ["02_kv_cache"]
    assert "02_kv_cache" in [quiz.chapter for quiz in open_quizzes()]
    assert title("02_kv_cache") == "02 The KV cache"
    for name in ("77", "kv", "", "-2"):
        with pytest.raises(QuizError, match="inferlab quiz 02"):
            open_quizzes([name])


def test_what_is_due_keeps_its_order_and_items_that_are_gone_are_left_out() -> None:
    due = ["02_kv_cache/oom-order", "02_kv_cache/gone", "99_x/y", "02_kv_cache/max-context"]
    assert [q.key for q in draw_due([KV], due, None, 0)] == [due[0], due[3]]


def other(quiz: Quiz, chapter: str, count: int) -> Quiz:
    return quiz.model_copy(update={"chapter": chapter, "items": quiz.items[:count]})


@pytest.mark.parametrize("seed", range(5))
def test_an_interview_takes_about_its_time_and_asks_each_chapter_in_turn(seed: int) -> None:
    quizzes = [KV, other(KV, "03_x", 5)]
    drawn = draw_interview(quizzes, None, seed, 12)
    assert [q.key for q in drawn] == [q.key for q in draw_interview(quizzes, None, seed, 12)]
    assert 4 <= len(drawn) <= 12
    assert len({q.key for q in drawn}) == len(drawn)
    chapters = [q.key.split("/")[0] for q in drawn]
    assert abs(chapters.count("02_kv_cache") - chapters.count("03_x")) <= 1
    everything = draw_interview(quizzes, None, seed, 10_000)
    assert len(everything) == len(KV.items) + 5


def test_interviews_differ_by_seed_and_keep_to_a_tag() -> None:
    assert len({tuple(q.id for q in draw_interview([KV], None, seed, 10)) for seed in range(10)}) > 5
    assert {q.id for q in draw_interview([KV], "requests", 0, 999)} == {q.id for q in KV.draw(tag="requests")}


def test_only_items_with_random_numbers_leave_in_copies_and_no_copy_twice() -> None:
    for exported in draw_exported(KV, None):
        prompts = [question.prompt for question in exported.copies]
        assert len(set(prompts)) == len(prompts)
        assert len(prompts) == 1 or exported.item.params
        assert math.prod(map(len, exported.item.spaces().values())) >= len(prompts)
    assert max(len(exported.copies) for exported in draw_exported(KV, None)) == 3
