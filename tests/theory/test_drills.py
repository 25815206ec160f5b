"""Drills are pure functions of their seed, always solvable, and the checker knows right from nearly right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory.drills import check, make_drill
from reference_impl.theory.kv_cache import bytes_per_token, cache_bytes, concurrent_requests, weight_bytes

SEEDS = st.integers(0, 2**32 - 1)
KEYS = ["kv_bytes_per_token", "kv_bytes", "prefill_flops", "decode_flops", "decode_floor", "concurrent_requests"]


@given(SEEDS)
def test_the_same_seed_gives_the_same_drill(seed: int) -> None:
    assert make_drill(seed) == make_drill(seed)
    assert [q.key for q in make_drill(seed).questions] == KEYS


@given(SEEDS)
def test_the_right_answer_is_accepted_and_ten_percent_off_is_not(seed: int) -> None:
    drill = make_drill(seed)
    for question in drill.questions:
        assert check(drill, question.key, question.answer).correct
        for factor in (0.9, 1.1):
            verdict = check(drill, question.key, question.answer * factor)
            assert not verdict.correct
            assert f"expected {question.answer:.4g} {question.unit}" in verdict.message


@given(SEEDS)
def test_every_named_mistake_is_wrong_and_is_recognised(seed: int) -> None:
    drill = make_drill(seed)
    for question in drill.questions:
        for value in question.mistakes.values():
            verdict = check(drill, question.key, value)
            assert not verdict.correct
            if value > 0:
                assert "Your number is" in verdict.message


@given(SEEDS)
def test_the_weights_and_at_least_four_requests_fit_the_machine(seed: int) -> None:
    drill = make_drill(seed)
    usable = 0.9 * drill.num_devices * drill.device.capacity
    assert weight_bytes(drill.shape) + cache_bytes(drill.shape, drill.context_tokens, 4) < usable
    assert drill.question("concurrent_requests").answer >= 4
    for number in ("layers", "num_kv_heads", "head_dim"):
        assert str(getattr(drill.shape, number)) in drill.describe()


@given(SEEDS)
def test_answers_follow_from_the_calculators(seed: int) -> None:
    drill = make_drill(seed)
    each = bytes_per_token(drill.shape)
    assert drill.question("kv_bytes_per_token").answer * 1000 == pytest.approx(each)
    assert drill.question("kv_bytes").answer * 1e9 == pytest.approx(each * drill.context_tokens)
    count = concurrent_requests(
        drill.num_devices * drill.device.capacity, weight_bytes(drill.shape), drill.context_tokens, each
    )
    assert drill.question("concurrent_requests").answer == count


def test_a_binary_number_is_told_from_a_wrong_one() -> None:
    drill = make_drill(1)
    answer = drill.question("kv_bytes").answer
    assert "GiB" in check(drill, "kv_bytes", answer * 1e9 / 2**30).message


def test_query_heads_are_named_as_the_mistake() -> None:
    drill = make_drill(1)
    wrong = drill.question("kv_bytes_per_token").mistakes["counting query heads instead of KV heads"]
    assert "query heads" in check(drill, "kv_bytes_per_token", wrong).message


def test_an_unknown_question_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="kv_bytes"):
        make_drill(1).question("price")
