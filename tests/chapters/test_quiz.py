"""Every quiz.yaml: answers computed over all ranges, one defensible answer, options that give nothing away."""

import ast
import math
import re
import string
from pathlib import Path

import pytest
import yaml

from grader.quiz import Choice, Multi, Numeric, Quiz, close, evaluate, load_quiz, parse_answer

ROOT = Path(__file__).parents[2]
CHAPTERS = ROOT / "chapters"
FILES = sorted(CHAPTERS.glob("[0-9]*/quiz.yaml"))
QUIZZES = {path.parent.name: load_quiz(path.parent.name, path) for path in FILES}
ITEMS = [(slug, item) for slug, quiz in QUIZZES.items() for item in quiz.items]
COVERAGE = yaml.load((CHAPTERS / "coverage.yaml").read_text("utf-8"), yaml.CSafeLoader)["items"]
every_item = pytest.mark.parametrize(("slug", "item"), ITEMS, ids=[f"{slug}-{item.id}" for slug, item in ITEMS])
every_quiz = pytest.mark.parametrize("quiz", QUIZZES.values(), ids=QUIZZES)


@every_quiz
def test_the_file_says_which_chapter_it_belongs_to(quiz: Quiz) -> None:
    assert QUIZZES[quiz.chapter] is quiz


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


REFERS_TO_OTHERS = re.compile(
    r"\b(all|none|both|neither|any|each) of (the|these|them|those)( above| other| others| options| answers)?$"
    r"|\bof the (above|others|options)\b"
    r"|\b(both )?\(?[a-h]\)? (and|or) \(?[a-h]\)?( are| is)?( right| true| correct)?$",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    ("text", "refers"),
    [
        ("All of the above", True), ("none of these", True), ("Both a and b", True), ("a or c", True),
        ("Neither of the others, as both are slow", True), ("Neither of them, as both use 128", False),
        ("Like S·T, since each new token meets the prompt once", False), ("b, in bytes", False),
    ],
)  # fmt: skip
def test_an_option_about_other_options_is_recognised(text: str, refers: bool) -> None:
    assert bool(REFERS_TO_OTHERS.search(text)) == refers


@every_item
def test_options_are_alike_in_length_and_form_and_none_refers_to_the_others(slug: str, item: object) -> None:
    if not isinstance(item, Choice | Multi):
        return
    for seed in range(5):
        options = item.draw(seed).options
        lengths = [len(option) for option in options]
        assert max(lengths) <= 1.6 * min(lengths), lengths
        assert len({option[-1] in ".!?" for option in options}) == 1, "some end with a full stop, some do not"
        assert len({option[0].islower() for option in options}) == 1, "some begin with a capital, some do not"
        assert len({option.strip(string.punctuation + " ").casefold() for option in options}) == len(options)
        assert not [option for option in options if REFERS_TO_OTHERS.search(option)]


def allowed(chances: list[float]) -> float:
    """How often something with these chances may happen: as expected, and twice the standard deviation more."""
    return sum(chances) + 2 * math.sqrt(sum(p * (1 - p) for p in chances))


@every_quiz
@pytest.mark.parametrize("extreme", [max, min], ids=["longest", "shortest"])
def test_the_right_option_is_not_the_longest_or_shortest_more_often_than_chance(quiz: Quiz, extreme: object) -> None:
    found, chances = [], []
    for item in quiz.items:
        if isinstance(item, Choice):
            question = item.draw(0)
            lengths = [len(option) for option in question.options]
            if lengths.count(extreme(lengths)) == 1 and lengths[question.right] == extreme(lengths):  # type: ignore[operator]
                found.append(item.id)
            chances.append(1 / len(lengths))
    assert len(found) <= allowed(chances), found


def test_a_file_whose_right_options_are_always_the_longest_would_be_noticed() -> None:
    assert allowed([1 / 4] * 12) < 7
    assert allowed([1 / 4] * 4) < 4


@every_item
def test_a_wrong_option_says_why_in_its_own_words(slug: str, item: object) -> None:
    if isinstance(item, Choice | Multi):
        notes = [option.misconception for option in item.options if option.misconception]
        assert len(set(notes)) == len(notes)
        assert all(len(note.split()) >= 4 for note in notes)
    if isinstance(item, Numeric):
        assert len({mistake.misconception for mistake in item.mistakes}) == len(item.mistakes)


@every_item
def test_every_source_is_an_item_of_the_coverage_list(slug: str, item: object) -> None:
    for source in item.source:  # type: ignore[attr-defined]
        assert source in COVERAGE, f"{source}: expected an id of chapters/coverage.yaml, such as {slug[:2]}-01"
        assert source[:2] == slug[:2]


@every_quiz
def test_what_coverage_says_a_quiz_item_shows_is_a_source_of_that_item(quiz: Quiz) -> None:
    wrong = []
    for name, entry in COVERAGE.items():
        shown = entry["forms"].get("quiz", {})
        for target in shown if isinstance(shown, list) else [shown]:
            path, _, item = target.get("quiz", "").partition("#")
            if path == f"chapters/{quiz.chapter}/quiz.yaml" and name not in quiz.item(item).source:
                wrong.append(f"{item}: source lacks {name}")
    assert wrong == []


def drawn_tags(chapter: str) -> set[str | None] | None:
    """The tags with which the chapter's notebooks draw from its quiz; None in it: all. None: no notebook draws yet."""
    found: set[str | None] = set()
    for path in sorted((CHAPTERS / chapter).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "draw":
                owner = ast.unparse(node.func.value)
                if "load_quiz" in owner:
                    tags = [keyword.value for keyword in node.keywords if keyword.arg == "tag"] + node.args[1:2]
                    found.add(ast.literal_eval(tags[0]) if tags else None)
    return found or None


@every_quiz
def test_every_item_is_shown_by_a_notebook_and_every_tag_a_notebook_asks_for_exists(quiz: Quiz) -> None:
    drawn = drawn_tags(quiz.chapter)
    if drawn is None:  # the notebooks are still being written
        return
    known = {tag for item in quiz.items for tag in item.tags}
    assert drawn - {None} <= known
    if None not in drawn:
        assert [item.id for item in quiz.items if not set(item.tags) & drawn] == []


@every_quiz
def test_a_tag_is_lower_case_and_selects_something_worth_a_name(quiz: Quiz) -> None:
    tags = [tag for item in quiz.items for tag in item.tags]
    assert [tag for tag in tags if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", tag)] == []
    if drawn := drawn_tags(quiz.chapter):  # once, and by no notebook: most often a misspelling
        assert sorted({tag for tag in tags if tags.count(tag) == 1} - drawn) == []


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
        typed = typed_answer(question.kind, question.right, question.unit)
        assert question.check(parse_answer(question, typed)).correct


def typed_answer(kind: str, right: object, unit: str) -> str:
    if kind == "numeric":
        return f"{right!r} {unit}"
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
                assert verdict.score == 0
                assert verdict.message == f"{question.notes[i]}\n{question.why}"


def test_kinds_of_the_model_are_all_used_somewhere() -> None:
    assert {item.kind for _, item in ITEMS} == {"choice", "multi", "numeric", "order", "match", "short"}
