"""The four widgets of chapter 08: every control at both ends, and pictures that say what theory and traces say."""

import itertools
import re
from typing import Any

import numpy as np
import pytest

from chapters.widgets import accept_reject, draft_tree, speculation, token_origins
from chapters.widgets.accept_reject import pick
from chapters.widgets.draft_tree import Tree
from chapters.widgets.speculation import BATCHES, CONTEXTS, MACHINES, Measured, draw, gain, most_that_fit
from chapters.widgets.token_origins import origins
from reference_impl.interfaces import Row, StepDone
from reference_impl.theory import speculative
from reference_impl.theory.hardware import device

P, Q, NAMES = (0.5, 0.3, 0.2), (0.6, 0.1, 0.3), ("A", "B", "C")
TREE = Tree(("a", "b", "aa", "ab", "ba", "aba"), (-1, -1, 0, 0, 1, 3), (0.6, 0.3, 0.3, 0.2, 0.1, 0.1), kept=(0, 3))


def ends(control: Any) -> tuple[Any, Any]:
    if hasattr(control, "options"):
        values = [option[1] if isinstance(option, tuple) else option for option in control.options]
        return values[0], values[-1]
    return control.min, control.max


@pytest.mark.parametrize("make", [
    lambda: accept_reject(P, Q, NAMES), lambda: accept_reject(P, P, NAMES), lambda: draft_tree(TREE),
    lambda: draft_tree(Tree(("only",), (-1,), (1.0,))), lambda: speculation(),
    lambda: speculation([Measured("ngram, code", 1, 4, 1.5)], {"here": lambda batch, k: 1 + 0.1 * k}, machine="here"),
], ids=["stepper", "equal", "tree", "one draft", "explorer", "measured"])  # fmt: skip
@pytest.mark.usefixtures("painted")
def test_every_control_works_at_both_ends(make: Any) -> None:
    view = make()
    for control in view.controls.values():
        for value in ends(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value)
            assert "nan" not in view.shown.alt


@pytest.mark.parametrize("u", list(itertools.product((0.1, 0.65, 0.8), (0.1, 0.5, 0.9), (0.2, 0.9))))
def test_the_stepper_gives_what_the_rule_gives(u: tuple[float, float, float]) -> None:
    shown = accept_reject(P, Q, NAMES, step=3, u=u).shown.alt
    guess = int(np.searchsorted(np.cumsum(Q), u[0], side="right"))
    if u[1] < P[guess] / Q[guess]:
        assert f"Draft {NAMES[guess]!r}" in shown
        assert "kept, so u3 is not used" in shown
    else:
        assert "rejected; 'B' comes out" in shown  # the only token that p has more of
    assert "kept 80.0%, rejected 20.0%" in shown


def test_the_stepper_tells_one_number_at_a_time() -> None:
    said = [accept_reject(P, Q, NAMES, step=step, u=(0.95, 0.9, 0.5)).shown.alt for step in range(4)]
    assert "Draft" not in said[0]
    assert "Draft 'C'" in said[1]
    assert "rejected" not in said[1].partition("Step")[2]
    assert "u2 = 0.90 ≥ p/q = 0.67: rejected" in said[2]
    assert "comes out" not in said[2]
    assert "comes out" in said[3]


def test_a_token_of_no_probability_is_never_drawn() -> None:
    assert pick(np.array([0.0, 1.0, 0.0]), 0.0) == 1
    assert pick(np.array([0.0, 1.0, 0.0]), 0.999) == 1


@pytest.mark.parametrize("p", [(0.5, 0.5), (0.5, 0.3, 0.3), (0.7, 0.5, -0.2)])
def test_what_is_no_distribution_is_refused(p: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="p: expected 3 probabilities"):
        accept_reject(p, Q, NAMES)


def test_a_draft_sees_its_own_path_and_no_other_branch() -> None:
    assert TREE.path(5) == [0, 3, 5]
    assert TREE.depths == [1, 1, 2, 2, 2, 3]
    assert np.flatnonzero(TREE.mask[5]).tolist() == [0, 3, 5]
    assert np.flatnonzero(TREE.mask[4]).tolist() == [1, 4]
    assert "attends to the text and to 3 of them: a → ab → aba" in draft_tree(TREE, 5).shown.alt
    assert "Kept by the target: a → ab" in draft_tree(TREE, 5).shown.alt


@pytest.mark.parametrize(("parents", "chances", "said"), [
    ((-1, 2, 0), (1.0, 1.0, 1.0), "draft 1's parent"), ((-1,), (1.0,), "for each of 3"),
])  # fmt: skip
def test_a_tree_whose_parents_do_not_come_first_is_refused(parents: Any, chances: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Tree(("a", "b", "c"), parents, chances)


def test_the_explorer_shows_the_formula_and_the_best_number() -> None:
    view = speculation(acceptance=0.8, num_drafts=4, draft_cost=0.2, machine="v = 1, as in the paper")
    assert "= 1.87x at batch 1" in view.shown.alt
    best = speculative.best_num_drafts(0.8, 0.2, most=8)
    assert f"Best here: k = {best}" in view.shown.alt
    view.controls["acceptance"].value = 0.1
    assert "Best here: no drafts" in view.shown.alt


def test_drafts_stop_paying_in_a_large_batch_and_later_with_a_long_context() -> None:
    short, long = (MACHINES[f"8B on one H100, context {n}"] for n in ("1,000", "8,000"))
    assert gain(short, 0.6, 4, 0.05, 1) > 1 > gain(short, 0.6, 4, 0.05, 512)
    assert gain(long, 0.6, 4, 0.05, 256) > gain(short, 0.6, 4, 0.05, 256)


def test_an_unknown_machine_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="v = 1"):
        speculation(machine="B300")


def test_points_of_one_machine_are_not_drawn_under_the_curve_of_another() -> None:
    points = [Measured("ngram, code", 1, 4, 1.5)]
    machines = {**MACHINES, "here": lambda batch, k: 1.0}
    settings = {"acceptance": 0.6, "num_drafts": 4, "draft_cost": 0.0, "batch": 1}
    for machine in machines:
        assert ("1 measured points" in draw(machines, points, machine, **settings).alt) == (machine == "here")


def steps() -> list[StepDone]:
    rows = [  # (row of "r", new tokens): a prompt in two chunks, then drafts kept in part, whole, and none
        (Row("r", 0, 4, False), 0), (Row("r", 4, 2, True), 1), (Row("r", 6, 1, True, 3), 2),
        (Row("r", 8, 1, True, 2), 3), (Row("r", 11, 1, True, 2), 1), (Row("r", 12, 1, True), 1),
    ]  # fmt: skip
    other = Row("s", 0, 1, True)
    return [StepDone(n, 0.0, 1.0, (other, row), (), 0, 2, 5, num_sampled=(1, new)) for n, (row, new) in enumerate(rows)]


def test_each_token_is_said_to_come_from_where_it_came_from() -> None:
    found = origins(steps(), "r")
    assert [o.kind for o in found] == ["plain", "draft", "instead", "draft", "draft", "bonus", "instead", "plain"]
    assert [o.step for o in found] == [0, 1, 1, 2, 2, 2, 3, 4]
    view = token_origins(steps(), "r", range(8), lambda token: f"<{token}>")
    assert "8 tokens of 5 steps: 3 a draft that was kept, 2 in place" in view.shown.alt
    assert "&lt;3&gt;" in view.shown.html
    view.controls["steps"].value = 2
    assert "3 tokens of 2 steps" in view.shown.alt
    view.controls["steps"].value = 0
    assert "0 tokens of 0 steps" in view.shown.alt


def test_a_trace_that_does_not_hold_all_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="all 9 output tokens, got steps with 8"):
        token_origins(steps(), "r", range(9), str)


@pytest.mark.parametrize(("machine", "context"), CONTEXTS.items())
@pytest.mark.parametrize("k", [1, 8])
def test_the_explorer_says_which_batches_do_not_fit(machine: str, context: int, k: int) -> None:
    """By hand: 8.03e9 weights of 2 bytes; 32 layers, 8 heads of 128, keys and values of 2 bytes."""
    room = (0.9 * device("H100").capacity - 2 * 8.03e9) / (2 * 32 * 8 * 128 * 2)
    most = most_that_fit(machine, k)
    assert most == pytest.approx(room / (context + k + 1), rel=0.01)
    last = max(batch for batch in BATCHES if batch <= most)
    for batch in (last, 2 * last):
        shown = draw(MACHINES, (), machine, 0.7, k, 0.0, batch).alt
        assert ("This batch does not fit" in shown) == (batch > most)
        assert f"Only up to {most} requests fit" in shown


def test_the_paper_s_machine_has_room_for_all() -> None:
    assert most_that_fit(next(iter(MACHINES)), 4) is None
    assert "fit" not in draw(MACHINES, (), next(iter(MACHINES)), 0.7, 4, 0.0, 512).alt
