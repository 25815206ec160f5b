"""Speculative decoding in formulas (Leviathan et al. 2023): what a step gives, what it costs, how many drafts pay.

A step with k drafts for each request gives E tokens on average and takes v(k) times as long as one without; each draft
token takes the time of c steps without:

    E = 1 + a + a^2 + ... + a^k        a: probability that a draft token is kept, given that those before it were
    speed-up = E / (v(k) + k c)

The paper takes v(k) for 1. `verify_seconds` says when it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from reference_impl.theory import latency
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.units import Number


def expected_tokens(acceptance: Number, num_drafts: Number) -> Number:
    """Tokens of a step, the drafts that are kept and one more: (1 - a^(k + 1)) / (1 - a), k + 1 where a = 1."""
    a, k = np.asarray(acceptance, float), np.asarray(num_drafts, float)
    if np.any((a < 0) | (a > 1)) or np.any(k < 0):
        raise ValueError(f"expected an acceptance in [0, 1] and at least 0 drafts, got {acceptance} and {num_drafts}")
    found = np.where(a < 1, (1 - a ** (k + 1)) / np.where(a < 1, 1 - a, 1), k + 1)
    return found if found.ndim else float(found)


def expected_tokens_by_position(chances: Sequence[float]) -> float:
    """Like `expected_tokens`, with a chance of its own for each draft token, given that those before it were kept."""
    return float(1 + np.cumprod(chances).sum())


def kept_share(acceptance: Number, num_drafts: Number) -> Number:
    """Share of the drafts that are kept, of k a request and step: (E - 1) / k. Not a: what follows a wrong draft is
    dropped, too."""
    return (expected_tokens(acceptance, num_drafts) - 1) / num_drafts


def speed_up(tokens: Number, num_drafts: Number, draft_cost: Number, verify_cost: Number = 1.0) -> Number:
    """Times as fast as without drafts. tokens: E. draft_cost: c. verify_cost: v(k). Costs in steps without drafts."""
    return tokens / (verify_cost + num_drafts * draft_cost)


def break_even_acceptance(num_drafts: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """The acceptance at which the speed-up is 1; 1.0 if even that is not enough (then it never pays)."""
    low, high = 0.0, 1.0
    if expected_tokens(1.0, num_drafts) <= verify_cost + num_drafts * draft_cost:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        pays = expected_tokens(middle, num_drafts) > verify_cost + num_drafts * draft_cost
        low, high = (low, middle) if pays else (middle, high)
    return high


def best_num_drafts(
    acceptance: float, draft_cost: float, verify_cost: Callable[[int], float] | None = None, most: int = 16
) -> int:
    """The k of 0 to `most` with the largest speed-up, the smallest of equal ones. verify_cost: v by k; None: 1."""
    v = verify_cost or (lambda k: 1.0)
    return max(
        range(most + 1), key=lambda k: (speed_up(expected_tokens(acceptance, k), k, draft_cost, v(k) if k else 1.0), -k)
    )


def verify_seconds(where: Deployment, batch: int, context: int, num_drafts: int) -> float:
    """Seconds of a decode step of `batch` requests, each with `num_drafts` drafts and `context` tokens in the cache.
    There are logits for every draft token, since each is judged."""
    new, past = np.full(batch, num_drafts + 1.0), np.full(batch, float(context))
    shape, n = where.shape, where.num_devices
    flops = np.sum(latency.pass_flops(shape, new, past))
    moved = where.read + where.cache_copies * np.sum(latency.cache_traffic(shape, new, past, where.kv_bytes))
    bound = latency.step_bound(flops / n, moved / n, where.device, where.precision, where.mfu, where.mbu)
    return float(bound) + where.communication_seconds(float(new.sum()))


def verify_cost(where: Deployment, batch: int, context: int, num_drafts: int) -> float:
    """The cost v(k): `verify_seconds` with drafts over without."""
    return verify_seconds(where, batch, context, num_drafts) / verify_seconds(where, batch, context, 0)


def draft_cost(where: Deployment, draft: Deployment, batch: int, context: int) -> float:
    """The cost c: a decode step of the draft over one of the target, for the same requests."""
    return verify_seconds(draft, batch, context, 0) / verify_seconds(where, batch, context, 0)


def acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """The probability that rejection keeps a draft token from q where the target has p: sum min(p, q)."""
    return float(np.minimum(p, q).sum())


def match_acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """The same probability where a draft token is kept if an independent sample from p equals it: sum p q."""
    return float(np.dot(p, q))


def residual(p: Sequence[float], q: Sequence[float]) -> np.ndarray:
    """The distribution that replaces a rejected draft token: max(p - q, 0) over its sum. Raises ValueError where p = q,
    since then no draft is rejected."""
    rest = np.maximum(np.subtract(p, q), 0)
    if rest.sum() <= 0:
        raise ValueError("p and q are equal: no draft token is rejected, so there is no residual")
    found: np.ndarray = rest / rest.sum()
    return found


def experts_touched(num_experts: Number, per_token: Number, tokens: Number) -> Number:
    """Different experts of one layer that `tokens` tokens go to, on average, if each token chooses its k of n by
    itself: n (1 - (1 - k / n)^tokens)."""
    return num_experts * (1 - (1 - per_token / num_experts) ** tokens)


def mixture_read(
    shared: Number, of_each_expert: Number, num_experts: Number, per_token: Number, tokens: Number
) -> Number:
    """Parameters that a step of `tokens` tokens reads. shared: those that every token uses; of_each_expert: those of
    one expert in all layers together."""
    return shared + of_each_expert * experts_touched(num_experts, per_token, tokens)


def drafts_worth(acceptance: float, price: float, most: int = 64) -> int:
    """How many drafts are worth their time: j while acceptance^j > price, at most `most`. price: tokens that the
    engine gives in the time which one more token takes in a step."""
    k = 0
    while k < most and acceptance ** (k + 1) > price:
        k += 1
    return k
