"""A `Handover` as a value of JSON, and back. It may come from another machine: whatever is not one is a ValueError that
names the field. What depends on the engine (its vocabulary, its lengths) is checked when it takes the request up."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from math import inf, isnan
from typing import Any, TypeVar

from reference_impl.features.handover.progress import Handover, Progress
from reference_impl.interfaces import SamplingParams, TokenLogprobs
from reference_impl.interfaces.sampling_fields import MOST, MOST_SAMPLES

Value = TypeVar("Value")


def to_json(handover: Handover) -> dict[str, Any]:
    """The hand-over as a dict that the json module writes without loss. Of sampling only what is not as by default."""
    sampling, p = handover.sampling, handover.progress
    asked = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    asked = {field.name: asked[field.name] for field in fields(sampling) if asked[field.name] != field.default}
    return {
        "prompt": list(handover.prompt),
        "sampling": {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()},
        "seed": p.seed,
        "tokens": list(p.tokens),
        "sample_index": p.sample_index,
        "num_unstreamed": p.num_unstreamed,
        "has_grammar": p.has_grammar,
        "logprobs": _written(p.logprobs),
        "prompt_logprobs": _written(p.prompt_logprobs),
    }


def from_json(message: object) -> Handover:
    """The hand-over that `to_json` made a message of. ValueError for anything else."""
    names = ("prompt", "sampling", *(field.name for field in fields(Progress)))
    if not isinstance(message, dict) or message.keys() != {*names}:
        raise ValueError(f"a hand-over: expected an object with {', '.join(names)}; got {reprlib.repr(message)}")
    tokens = _list("tokens", message["tokens"], _token)
    progress = Progress(
        seed=_number("seed", message["seed"], 2**64 - 1),
        tokens=tokens,
        sample_index=_number("sample_index", message["sample_index"], MOST_SAMPLES - 1),
        num_unstreamed=_number("num_unstreamed", message["num_unstreamed"], len(tokens)),
        has_grammar=_is("has_grammar", message["has_grammar"], bool, "true or false"),
        logprobs=_list("logprobs", message["logprobs"], _report),
        prompt_logprobs=_list("prompt_logprobs", message["prompt_logprobs"], _report),
    )
    return Handover(_list("prompt", message["prompt"], _token), _sampling(message["sampling"]), progress)


def _sampling(value: object) -> SamplingParams:
    given = _is("sampling", value, dict, "an object")
    if unknown := given.keys() - {field.name for field in fields(SamplingParams)}:
        raise ValueError(f"a hand-over: sampling: no such field: {reprlib.repr(sorted(map(str, unknown)))}")
    try:
        return SamplingParams(**given)
    except TypeError as error:  # a list was expected, or its members were not of a kind
        raise ValueError(f"a hand-over: sampling: {error}") from None


def _written(reports: Sequence[TokenLogprobs]) -> list[Any]:
    """[token, logprob, [[token, logprob], ...]] of each. JSON has no infinities: null is a probability of 0."""
    return [[r.token, _finite(r.logprob), [[token, _finite(value)] for token, value in r.top]] for r in reports]


def _finite(logprob: float) -> float | None:
    return None if logprob == -inf else logprob


def _report(name: str, value: object) -> TokenLogprobs:
    token, logprob, top = _members(name, value, 3)
    return TokenLogprobs(_token(name, token), _logprob(name, logprob), _list(name, top, _likely))


def _likely(name: str, value: object) -> tuple[int, float]:
    token, logprob = _members(name, value, 2)
    return _token(name, token), _logprob(name, logprob)


def _logprob(name: str, value: object) -> float:
    if value is None:
        return -inf
    if not isinstance(value, float) or isnan(value) or value == inf:
        raise ValueError(f"a hand-over: {name}: expected a log-probability or null, got {reprlib.repr(value)}")
    return value


def _members(name: str, value: object, number: int) -> list[Any]:
    if len(found := _is(name, value, list, f"lists of {number}")) != number:
        raise ValueError(f"a hand-over: {name}: expected lists of {number}, got {reprlib.repr(value)}")
    return found


def _list(name: str, value: object, member: Callable[[str, object], Value]) -> tuple[Value, ...]:
    return tuple(member(name, each) for each in _is(name, value, list, "a list"))


def _token(name: str, value: object) -> int:
    return _number(name, value, MOST)


def _number(name: str, value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"a hand-over: {name}: expected a whole number from 0 to {most}, got {reprlib.repr(value)}")
    return value


def _is(name: str, value: object, kind: type[Value], expected: str) -> Value:
    if not isinstance(value, kind):
        raise ValueError(f"a hand-over: {name}: expected {expected}, got {reprlib.repr(value)}")
    return value
