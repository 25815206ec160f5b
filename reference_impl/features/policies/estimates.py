"""Estimates of how many tokens a request will take, for policies that guess."""

from __future__ import annotations

import math
from collections.abc import Callable

from reference_impl.interfaces import Request

Estimate = Callable[[Request], float]


def most_tokens(request: Request) -> int:
    """The most tokens a request can compute: the rest of its prompt, and all the output it may have.

    A poor guess of the output, but a safe one; a better one can be passed to each policy that guesses.
    A further sample of the same prompt (n > 1) computes only the prompt's last token again.
    """
    prompt = request.num_missing_tokens if request.parent_id is None else 1
    return prompt + request.sampling.max_tokens


def cost_of(estimate: Estimate, request: Request) -> float:
    return at_least_0(f"estimate of request {request.id!r} (tokens)", estimate(request))


def at_least_0(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: expected a finite number, at least 0, got {value!r}")
    return value
