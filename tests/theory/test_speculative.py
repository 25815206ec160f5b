"""Speculative decoding in formulas: against enumeration of what is kept, and against a search."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import speculative as sd
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

H100 = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
shares = st.floats(0, 1)
weights = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)


def normed(values: list[float]) -> np.ndarray:
    return np.array(values) / sum(values)


def by_enumeration(chances: list[float]) -> float:
    """Over all outcomes of k independent coins: the run of heads at the start, and one."""
    total = 0.0
    for outcome in itertools.product((True, False), repeat=len(chances)):
        chance = math.prod(c if kept else 1 - c for kept, c in zip(outcome, chances, strict=True))
        total += chance * (1 + len(list(itertools.takewhile(bool, outcome))))
    return total


@given(shares, st.integers(0, 6))
def test_a_step_gives_the_drafts_before_the_first_wrong_one_and_one_more(a: float, k: int) -> None:
    assert sd.expected_tokens(a, k) == pytest.approx(by_enumeration([a] * k))
    if k:
        assert sd.kept_share(a, k) <= a + 1e-9  # what follows a wrong draft token is dropped, too


@given(st.lists(shares, max_size=6))
def test_chances_may_differ_by_position(chances: list[float]) -> None:
    assert sd.expected_tokens_by_position(chances) == pytest.approx(by_enumeration(chances))


def test_arrays_and_an_acceptance_of_one() -> None:
    assert sd.expected_tokens(np.array([0.0, 0.5, 1.0]), 3).tolist() == [1, 1.875, 4]


@pytest.mark.parametrize(("a", "k"), [(-0.1, 3), (1.1, 3), (0.5, -1)])
def test_what_is_no_probability_or_number_is_refused(a: float, k: int) -> None:
    with pytest.raises(ValueError, match="acceptance in"):
        sd.expected_tokens(a, k)


@given(st.integers(1, 8), st.floats(0, 0.5), st.floats(1, 2))
def test_at_the_break_even_the_speed_up_is_one(k: int, c: float, v: float) -> None:
    found = sd.break_even_acceptance(k, c, v)
    if found < 1:
        assert sd.speed_up(sd.expected_tokens(found, k), k, c, v) == pytest.approx(1)
    else:
        assert k + 1 <= v + k * c + 1e-9


@given(shares, st.floats(0, 0.5), st.floats(0, 0.5))
def test_the_best_number_is_that_of_a_search_and_the_smallest_of_equals(a: float, c: float, grows: float) -> None:
    gains = [1.0] + [sd.speed_up(sd.expected_tokens(a, k), k, c, 1 + grows * k) for k in range(1, 9)]
    found = sd.best_num_drafts(a, c, lambda k: 1 + grows * k, most=8)
    assert gains[found] == max(gains)
    assert found == gains.index(max(gains))


@given(weights, weights)
def test_acceptance_and_residual_make_up_the_target(one: list[float], other: list[float]) -> None:
    p, q = normed(one), normed(other)
    kept = sd.acceptance(p, q)
    assert kept == pytest.approx(1 - abs(p - q).sum() / 2)
    assert sd.match_acceptance(p, q) <= kept + 1e-12
    if 1 - kept > 1e-6:
        assert np.minimum(p, q) + (1 - kept) * sd.residual(p, q) == pytest.approx(p)


def test_equal_distributions_have_no_residual() -> None:
    with pytest.raises(ValueError, match="no draft token is rejected"):
        sd.residual([0.5, 0.5], [0.5, 0.5])


def test_without_drafts_a_step_takes_what_the_deployment_says_and_more_drafts_never_less() -> None:
    assert sd.verify_seconds(H100, 7, 999, 0) == H100.tpot(1000, 7)
    for batch in (1, 64, 512):
        v = [sd.verify_cost(H100, batch, 500, k) for k in range(9)]
        assert v[0] == 1
        assert v == sorted(v)
    assert sd.verify_cost(H100, 1, 500, 8) < 1.001
    assert sd.verify_cost(H100, 512, 500, 8) > 3


def test_a_smaller_model_costs_a_share_of_a_step() -> None:
    target = Deployment(model("llama-3-70b"), device("H100"), 4, mfu=0.5, mbu=0.8)
    assert 0 < sd.draft_cost(target, H100, 1, 500) < 1
    assert sd.draft_cost(target, target, 1, 500) == 1


@pytest.mark.parametrize(("n", "k", "tokens"), [(4, 1, 3), (4, 2, 2), (5, 2, 2)])
def test_experts_touched_are_those_of_all_choices(n: int, k: int, tokens: int) -> None:
    choices = list(itertools.combinations(range(n), k))
    sizes = [len(set().union(*each)) for each in itertools.product(choices, repeat=tokens)]
    assert sd.experts_touched(n, k, tokens) == pytest.approx(sum(sizes) / len(sizes))
    assert sd.mixture_read(10, 2, n, k, tokens) == pytest.approx(10 + 2 * sum(sizes) / len(sizes))


@given(st.floats(0.05, 0.95), st.floats(0.01, 0.99))
def test_a_draft_is_worth_it_while_its_chance_is_above_the_price(a: float, price: float) -> None:
    assert sd.drafts_worth(a, price) == sum(a**j > price for j in range(1, 65))
    assert sd.drafts_worth(1.0, 0.5, most=7) == 7
