"""From what a user gives to a request, checked once, here. Shapes and ranges of sampling are `SamplingParams`' own."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import fields
from os import urandom
from typing import Any

from reference_impl.interfaces import Request, SamplingParams
from reference_impl.interfaces.sampling_fields import BY_SAMPLER, FIELDS

# Fields of SamplingParams that ask for what the core does not have: they must keep their defaults.
NOT_IN_CORE = {field.name for field in FIELDS if field.reader not in ("core", "sampler")}


def make_request(
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    most_tokens: int,
    limits: str,
    **others: Any,
) -> Request:
    """A `Request` with these fields, and `others`. most_tokens: the most that it may have, prompt and output; limits:
    what that follows from, for the error.

    ValueError for a prompt that is empty, holds anything but ids of the vocabulary, or leaves no room for a token.
    """
    tokens = _checked(prompt, vocab_size)
    if len(tokens) >= most_tokens:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; at most {most_tokens - 1} and one token of output fit ({limits})"
        )
    ends = () if sampling.ignore_eos else eos_token_ids
    return Request(
        id=request_id,
        tokens=tokens,
        num_prompt_tokens=len(tokens),
        sampling=sampling,
        seed=sampling.seed if sampling.seed is not None else int.from_bytes(urandom(8), "big"),
        stop_token_ids=frozenset((*sampling.stop_token_ids, *ends)),
        max_total_tokens=min(len(tokens) + sampling.max_tokens, most_tokens),
        **others,
    )


def _checked(prompt: Sequence[int], vocab_size: int) -> list[int]:
    if not prompt:
        raise ValueError("the prompt is empty: expected at least one token")
    try:
        tokens = [operator.index(token) for token in prompt]
    except TypeError:
        raise ValueError("the prompt: expected token ids, which are integers") from None
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt token {token} is outside the vocabulary [0, {vocab_size})")
    return tokens


def check_plain(sampling: SamplingParams) -> None:
    """Raises ValueError if a field asks for what only the features have."""
    for field in fields(sampling):
        if field.name in NOT_IN_CORE and (given := getattr(sampling, field.name)) != field.default:
            only = f"the core engine has only {field.default!r}, got {given!r}: use reference_impl.Engine for the rest"
            raise ValueError(f"SamplingParams.{field.name}: {only}")


def check_read(sampling: SamplingParams, reads: Collection[str], sampler: str) -> None:
    """Raises ValueError if a field asks for what this sampler does not read. reads: the fields that it reads."""
    for field in BY_SAMPLER:
        default = SamplingParams.__dataclass_fields__[field.name].default
        if field.name not in reads and (given := getattr(sampling, field.name)) != default:
            raise ValueError(
                f"SamplingParams.{field.name}: expected {default!r}, got {given!r}: {sampler} does not read it. Leave "
                "it out, or use another sampler (attention='torch' has torch's)"
            )
