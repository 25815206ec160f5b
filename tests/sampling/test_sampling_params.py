"""SamplingParams checks itself once, and says which field, what was expected, what came."""

from __future__ import annotations

from typing import Any

import pytest

from reference_impl.interfaces import SamplingParams

TEMPERATURE = "0 (greedy) or a finite number above 0"
BAD: list[tuple[str, list[Any], str]] = [
    ("max_tokens", [0, -1, 2**31], "1 to 2,147,483,647"),
    ("max_tokens", ["5", 2.5, True], "an integer"),
    ("temperature", [-0.1, -1e-45, float("inf"), float("nan")], TEMPERATURE),
    ("temperature", ["0.7", None, False], "a number"),
    ("top_k", [-2, 10**30], "0 or -1 (off) or 1 to 2,147,483,647"),
    ("top_k", [2.0, None], "an integer"),
    ("top_p", [0, -0.5, 1.01, float("nan"), 1e-320, 5e-324], "1e-9 to 1 (off)"),
    ("top_p", ["0.9", None], "a number"),
    ("min_p", [-0.01, 1.1, float("nan"), float("inf")], "between 0 (off) and 1"),
    (
        "repetition_penalty",
        [0, -1, 1e-45, 0.009, 101, 1e30, float("inf"), float("nan")],
        "0.01 to 100 (1 is off)",
    ),
    ("presence_penalty", [-2.1, 2.1, float("nan"), -float("inf")], "between -2 and 2"),
    ("frequency_penalty", [-2.1, 2.1, float("nan")], "between -2 and 2"),
    ("seed", [-1, 2**64], "None or an integer in [0, 2**64)"),
    ("seed", [1.5, "1", True], "an integer or None"),
    ("stop", ["", ["a", ""], ["a", 3], 5], "a string, or non-empty strings"),
    ("stop_token_ids", [["a"], "ab", [1.5], [True], [-1], [2**31]], "token ids from 0 to 2,147,483,647"),
    ("min_tokens", [-1, 129], "0 to max_tokens, which is 128"),
    ("min_tokens", [1.0, True, None], "an integer"),
    (
        "logit_bias",
        [
            {"x": 1},
            {"9" * 5000: 1},
            {"-1": 1},
            {-1: 0},
            {2**31: 0},
            {1: 10**400},
            {1: 100.5},
            {1: -101},
            {1: True},
            {1: float("nan")},
            {1: "2"},
            [1, 2],
            {True: 1},
        ],
        "None or {token id: a number from -100 to 100}",
    ),
    ("ignore_eos", [1, None], "True or False"),
    ("include_stop_str_in_output", ["yes", 0], "True or False"),
    ("skip_special_tokens", [None], "True or False"),
    ("detokenize", [None, 0], "True or False"),
    ("allowed_token_ids", [[], 5, "ab", [1.0], [-1], [True], [2**31]], "None, or token ids from 0 to 2,147,483,647"),
    ("bad_words", [[""], [" "], [1], "x", 5], "a list of strings that are not blank"),
    ("logprobs", [-2, 10**30], "None, -1 (all) or 0 to 2,147,483,647"),
    ("n", [0, -1, 10**9], "1 to 10,000"),
    ("n", [True, 1.0, None], "an integer"),
    ("seed", [10**5000], "an integer or None"),
    ("max_tokens", [10**5000], "an integer"),
    ("repetition_penalty", [10**400], "a number"),
    ("temperature", [10**400], "a number"),
    ("top_p", [10**400], "a number"),
    ("logprobs", [1.0, True], "an integer or None"),
]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [(f, v, e) for f, values, e in BAD for v in values],
    ids=lambda v: repr(v) if not isinstance(v, int) or v < 10**300 else "huge",
)
def test_a_wrong_value_is_named(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is looked at below)
        SamplingParams(**{field: value})
    assert str(error.value).startswith(f"SamplingParams.{field}: expected {expected}, got ")


def test_one_string_or_none_will_do_for_stop() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


def test_less_1_is_vllms_name_for_all_tokens() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(logprobs=-1, prompt_logprobs=-1).logprobs == 2**31 - 1


def test_vllms_other_forms() -> None:
    plain = SamplingParams()
    assert SamplingParams(bad_words=[], allowed_token_ids=None, detokenize=True) == plain == plain.clone()
    assert SamplingParams(max_tokens=None).max_tokens == 2**31 - 1  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={"5": 1}).logit_bias == {5: 1}  # type: ignore[dict-item]
    assert SamplingParams(allowed_token_ids=[3, 4]) == SamplingParams(allowed_token_ids=(3, 4))
    with pytest.raises(ValueError, match="detokenize: expected True where there are stop strings, got False"):
        SamplingParams(detokenize=False, stop="x")


def test_parameters_can_be_hashed_with_a_bias_too() -> None:
    assert len({SamplingParams(logit_bias={1: 2}), SamplingParams(logit_bias={1: 2}), SamplingParams()}) == 2


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(logit_bias={0: -100, 7: 100.0}, min_tokens=128)
    SamplingParams(logit_bias={})
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=1, seed=2**64 - 1, logprobs=0)
    SamplingParams(temperature=1e6, top_k=2**31 - 1, top_p=1e-9, min_p=5e-324, repetition_penalty=100, n=10_000)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01, seed=0, temperature=1e-9)
