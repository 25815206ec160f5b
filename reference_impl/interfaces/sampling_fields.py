"""The fields of `SamplingParams` in one table: for each field who reads it, its kind, its range, and what an error
says. Defaults stand in the class, which imports this file and so has no type here; names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

MOST = 2**31 - 1  # of counts and token ids, which tensors hold in 32 bits
MOST_SAMPLES = 10_000  # of one prompt; each is a request of its own


class Field(NamedTuple):
    """A field of SamplingParams. reader: "core", the core's engine; "sampler", from its columns; "scores", features of
    the worker that change the scores before the sampler gets them; "features", others of the engine and the text.
    is_right: whether the field of p, SamplingParams in normal form, is in its range. expected: what it should be, for
    the error; may name p in braces."""

    name: str
    reader: Literal["core", "sampler", "scores", "features"]
    kind: type | None  # int, float, bool; None: is_right looks
    is_right: Callable[[Any], bool]
    expected: str
    may_be_none: bool = False


FIELDS = (
    Field("max_tokens", "core", int, lambda p: 1 <= p.max_tokens <= MOST, f"1 to {MOST:,}"),
    Field(
        "temperature", "sampler", float, lambda p: 0 <= p.temperature < float("inf"),
        "0 (greedy) or a finite number above 0",
    ),
    Field("top_k", "sampler", int, lambda p: 0 <= p.top_k <= MOST, f"0 or -1 (off) or 1 to {MOST:,}"),
    Field("top_p", "sampler", float, lambda p: 1e-9 <= p.top_p <= 1, "1e-9 to 1 (off)"),
    Field("min_p", "sampler", float, lambda p: 0 <= p.min_p <= 1, "between 0 (off) and 1"),
    Field(
        "repetition_penalty", "scores", float, lambda p: 0.01 <= p.repetition_penalty <= 100, "0.01 to 100 (1 is off)"
    ),
    Field("presence_penalty", "scores", float, lambda p: -2 <= p.presence_penalty <= 2, "between -2 and 2"),
    Field("frequency_penalty", "scores", float, lambda p: -2 <= p.frequency_penalty <= 2, "between -2 and 2"),
    Field(
        "seed", "core", int, lambda p: p.seed is None or 0 <= p.seed < 2**64, "None or an integer in [0, 2**64)", True
    ),
    Field(
        "stop", "core", None, lambda p: all(isinstance(s, str) and s for s in p.stop), "a string, or non-empty strings"
    ),
    Field(
        "stop_token_ids", "core", None, lambda p: all(type(i) is int and 0 <= i <= MOST for i in p.stop_token_ids),
        f"token ids from 0 to {MOST:,}",
    ),
    Field("ignore_eos", "core", bool, lambda p: True, "True or False"),
    Field(
        "logprobs", "core", int, lambda p: 0 <= (p.logprobs or 0) <= MOST, f"None, -1 (all) or 0 to {MOST:,}", True
    ),
    Field(
        "prompt_logprobs", "features", int, lambda p: 0 <= (p.prompt_logprobs or 0) <= MOST,
        f"None, -1 (all) or 0 to {MOST:,}", True,
    ),
    Field("n", "features", int, lambda p: 1 <= p.n <= MOST_SAMPLES, f"1 to {MOST_SAMPLES:,}"),
    Field(
        "logit_bias", "scores", None, lambda p: _is_bias(p.logit_bias),
        "None or {{token id: a number from -100 to 100}}",
    ),
    Field(
        "min_tokens", "scores", int, lambda p: 0 <= p.min_tokens <= p.max_tokens,
        "0 to max_tokens, which is {p.max_tokens}",
    ),
    Field("include_stop_str_in_output", "features", bool, lambda p: True, "True or False"),
    Field("skip_special_tokens", "features", bool, lambda p: True, "True or False"),
    Field(
        "allowed_token_ids", "scores", None, lambda p: _are_tokens(p.allowed_token_ids),
        f"None, or token ids from 0 to {MOST:,}",
    ),
    Field(
        "detokenize", "features", bool, lambda p: p.detokenize or not p.stop, "True where there are stop strings"
    ),
    Field("bad_words", "features", None, lambda p: _are_words(p.bad_words), "a list of strings that are not blank"),
)  # fmt: skip
BY_SAMPLER = tuple(field for field in FIELDS if field.reader == "sampler")


def normal(given: Any) -> dict[str, Any]:
    """The normal form, which the engine reads, of fields that can be written in several ways, vLLM's among them:
    {name: value}. Other values stay as they are, for `check`."""
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
    """The token id that a string of digits means (a name in JSON is a string); anything else as it is."""
    return int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 11 else token


def check(p: Any) -> None:
    """Raises ValueError for a value out of range, with the field's name, what was expected and what came."""
    for field in FIELDS:  # kinds first: ranges compare fields
        value = getattr(p, field.name)
        if field.kind in (int, float) and not (value is None and field.may_be_none):
            kind = "an integer" if field.kind is int else "a number"
            right = isinstance(value, int if field.kind is int else int | float) and not isinstance(value, bool)
            long = right and isinstance(value, int) and value.bit_length() > 1000  # no float, and maybe no text, has it
            if long or not right:
                came = "hundreds of digits" if long else repr(value)
                expected = f"{kind}{' or None' * field.may_be_none}"
                raise ValueError(f"SamplingParams.{field.name}: expected {expected}, got {came}")
    for field in FIELDS:
        value = getattr(p, field.name)
        if field.kind is bool and not isinstance(value, bool):
            raise ValueError(f"SamplingParams.{field.name}: expected True or False, got {value!r}")
        if not field.is_right(p):
            raise ValueError(f"SamplingParams.{field.name}: expected {field.expected.format(p=p)}, got {value!r}")


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
