"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, one draw.

Rows are independent: each has its own parameters, and its own uniform number from `philox`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from reference_impl.interfaces import Request, Sampled, SamplingParams, TokenLogprobs
from reference_impl.sampling.philox import uniform


def choose(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    """One token per row of scores [num_rows, vocab_size], [num_rows] int64."""
    params = [r.sampling for r in requests]
    if all(p.temperature == 0 for p in params):
        return scores.argmax(dim=-1)
    u = uniform([r.seed for r in requests], [r.sample_index for r in requests], [r.num_tokens for r in requests])
    return draw(probabilities(scores, params), torch.from_numpy(u).to(scores.device))


def sample(
    logits: Tensor, requests: Sequence[Request], choose: Callable[[Tensor, Sequence[Request]], Tensor] = choose
) -> Sampled:
    """Chooses the next token of each request. logits [num_rows, vocab_size]."""
    params = [r.sampling for r in requests]
    if any(p.logprobs is not None for p in params):
        raw_logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = choose(apply_penalties(logits, requests), requests).tolist()
    reports: list[TokenLogprobs | None] = [None] * len(chosen)
    for row, (p, token) in enumerate(zip(params, chosen, strict=True)):
        if p.logprobs is not None:
            values, ids = raw_logprobs[row].topk(min(p.logprobs, logits.shape[1]))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            reports[row] = TokenLogprobs(token, float(raw_logprobs[row, token]), top)
    return Sampled(chosen, reports)


def apply_penalties(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Repetition (CTRL, Keskar et al. 2019), presence and frequency penalties; a new tensor where any is set."""
    rows = [
        (row, r) for row, r in enumerate(requests)
        if r.sampling.repetition_penalty != 1 or r.sampling.presence_penalty or r.sampling.frequency_penalty
    ]  # fmt: skip
    if not rows:
        return logits
    scores = logits.clone()
    for row, request in rows:
        p = request.sampling
        if p.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(request.tokens)), device=logits.device)
            s = scores[row, seen]
            scores[row, seen] = torch.where(s > 0, s / p.repetition_penalty, s * p.repetition_penalty)
        if request.output_tokens and (p.presence_penalty or p.frequency_penalty):
            output = torch.tensor(request.output_tokens, device=logits.device)
            ids, count = output.unique(return_counts=True)
            scores[row, ids] -= p.presence_penalty + p.frequency_penalty * count.to(scores.dtype)
    return scores


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution that each row is drawn from: [num_rows, vocab_size], float32 (float64 stays), rows sum to 1.

    Temperature 0 gives all mass to the largest logit (the first, if several are equal).
    """
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    greedy = column([p.temperature == 0 for p in params]).bool()
    # Largest score 0 before the division: a tiny temperature then gives 0 and -inf, not inf - inf.
    temperature = column([p.temperature or 1.0 for p in params]).clamp(torch.finfo(dtype).tiny, torch.finfo(dtype).max)
    scores = logits.to(dtype)
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
    if any(p.top_k or p.top_p < 1 for p in params):
        scores = _keep_top(scores, params, column([p.top_p for p in params]))
    probs = scores.softmax(dim=-1)
    if any(p.min_p for p in params):
        min_p = column([p.min_p for p in params])
        kept = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0)
        probs = torch.where(min_p > 0, kept / kept.sum(dim=-1, keepdim=True), probs)  # other rows: the same bits
    one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1)
    return torch.where(greedy, one_hot, probs)


def _keep_top(scores: Tensor, params: Sequence[SamplingParams], top_p: Tensor) -> Tensor:
    """-inf outside the top k, then outside the smallest set whose mass reaches top_p.

    Exactly k stay: of equal scores at the edge the lower token id. Top-p counts mass within the top k.
    """
    vocab_size = scores.shape[1]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    k = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params], device=scores.device)[:, None]
    ordered = ordered.masked_fill(torch.arange(vocab_size, device=scores.device)[None] >= k, -torch.inf)
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    # A token stays while the mass before it is below top_p; the first always stays.
    ordered = ordered.masked_fill((mass_before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse transform: the first token whose cumulative probability exceeds u. probs [rows, vocab], u [rows]."""
    cumulative = probs.double().cumsum(dim=-1)
    target = u.double()[:, None] * cumulative[:, -1:]  # the sum may miss 1 by rounding
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[1] - 1)
