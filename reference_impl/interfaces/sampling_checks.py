"""What may be asked for by `SamplingParams`: its fields in one form each, and within their ranges. It is below the
class that it checks, which so has no type here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Fields of SamplingParams that are numbers: (name, whole, may be None).
_NUMBERS = (
    ("max_tokens", True, False),
    ("temperature", False, False),
    ("top_k", True, False),
    ("top_p", False, False),
    ("min_p", False, False),
    ("repetition_penalty", False, False),
    ("presence_penalty", False, False),
    ("frequency_penalty", False, False),
    ("seed", True, True),
    ("logprobs", True, True),
    ("prompt_logprobs", True, True),
    ("n", True, False),
    ("min_tokens", True, False),
)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
MOST = 2**31 - 1  # of counts and token ids, which tensors hold in 32 bits
MOST_SAMPLES = 10_000  # of one prompt; each is a request of its own


def normal(given: Any) -> dict[str, Any]:
    """Fields that can be said in several ways, vLLM's among them, in the one that the engine reads. What is none of
    them stays as it is, for `check`."""
    found: dict[str, Any] = {}
    for name in ("stop", "stop_token_ids"):
        value = getattr(given, name)
        one = isinstance(value, str | int) or value is None
        found[name] = () if value is None else (value,) if one else tuple(value)
    if given.max_tokens is None:
        found["max_tokens"] = MOST
    for name, all_of_them in (("top_k", 0), ("logprobs", MOST), ("prompt_logprobs", MOST)):
        if type(getattr(given, name)) is int and getattr(given, name) == -1:
            found[name] = all_of_them
    if isinstance(given.logit_bias, Mapping):
        found["logit_bias"] = {_token(token): bias for token, bias in given.logit_bias.items()}
    if isinstance(given.allowed_token_ids, Iterable):
        found["allowed_token_ids"] = tuple(given.allowed_token_ids)
    if given.bad_words is None or isinstance(given.bad_words, list):
        found["bad_words"] = tuple(given.bad_words or ())
    return found


def _token(token: Any) -> Any:
    """A name in JSON is a string, also where it means a token id."""
    return int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 11 else token


def check(p: Any) -> None:
    """Raises ValueError that names the field, and says what was expected and what came."""
    for name, whole, optional in _NUMBERS:
        value = getattr(p, name)
        right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        long = right and isinstance(value, int) and value.bit_length() > 1000  # no float, and maybe no text, has it
        if long or not (right or (optional and value is None)):
            kind, came = "an integer" if whole else "a number", "hundreds of digits" if long else repr(value)
            raise ValueError(f"SamplingParams.{name}: expected {kind}{' or None' * optional}, got {came}")
    for name, ok, expected in _ranges(p):
        if not ok:
            raise ValueError(f"SamplingParams.{name}: expected {expected}, got {getattr(p, name)!r}")


def _ranges(p: Any) -> Iterable[tuple[str, bool, str]]:
    most = f"{MOST:,}"
    return (
        ("max_tokens", 1 <= p.max_tokens <= MOST, f"1 to {most}"),
        ("temperature", 0 <= p.temperature < float("inf"), "0 (greedy) or a finite number above 0"),
        ("top_k", 0 <= p.top_k <= MOST, f"0 or -1 (off) or 1 to {most}"),
        ("top_p", 1e-9 <= p.top_p <= 1, "1e-9 to 1 (off)"),
        ("min_p", 0 <= p.min_p <= 1, "between 0 (off) and 1"),
        ("repetition_penalty", 0.01 <= p.repetition_penalty <= 100, "0.01 to 100 (1 is off)"),
        ("presence_penalty", -2 <= p.presence_penalty <= 2, "between -2 and 2"),
        ("frequency_penalty", -2 <= p.frequency_penalty <= 2, "between -2 and 2"),
        ("seed", p.seed is None or 0 <= p.seed < 2**64, "None or an integer in [0, 2**64)"),
        ("stop", all(isinstance(s, str) and s for s in p.stop), "a string, or non-empty strings"),
        (
            "stop_token_ids",
            all(type(i) is int and 0 <= i <= MOST for i in p.stop_token_ids),
            f"token ids from 0 to {most}",
        ),
        ("logprobs", 0 <= (p.logprobs or 0) <= MOST, f"None, -1 (all) or 0 to {most}"),
        ("prompt_logprobs", 0 <= (p.prompt_logprobs or 0) <= MOST, f"None, -1 (all) or 0 to {most}"),
        ("n", 1 <= p.n <= MOST_SAMPLES, f"1 to {MOST_SAMPLES:,}"),
        ("min_tokens", 0 <= p.min_tokens <= p.max_tokens, f"0 to max_tokens, which is {p.max_tokens}"),
        ("logit_bias", _is_bias(p.logit_bias), "None or {token id: a number from -100 to 100}"),
        ("allowed_token_ids", _are_tokens(p.allowed_token_ids), f"None, or token ids from 0 to {most}"),
        ("detokenize", p.detokenize is not False or not p.stop, "True where there are stop strings"),
        ("bad_words", _are_words(p.bad_words), "a list of strings that are not blank"),
        *((name, isinstance(getattr(p, name), bool), "True or False") for name in _FLAGS),
    )


def _are_words(given: object) -> bool:
    """Whether they can be `bad_words`."""
    return isinstance(given, tuple) and all(isinstance(word, str) and word.strip() for word in given)


def _are_tokens(given: object) -> bool:
    """Whether they can be `allowed_token_ids`."""
    if not isinstance(given, tuple):
        return given is None
    return bool(given) and all(type(i) is int and 0 <= i <= MOST for i in given)


def _is_bias(given: object) -> bool:
    """Whether it can be a `logit_bias`."""
    if not isinstance(given, Mapping):
        return given is None
    return all(
        type(i) is int and 0 <= i <= MOST and type(b) in (int, float) and abs(b) <= 100 for i, b in given.items()
    )
