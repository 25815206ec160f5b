"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, one draw.

Rows are independent: each has its own parameters, and its own uniform number from `philox`.

`sample(logits, requests)` does it all, and waits. A worker that goes on meanwhile takes it apart: `Parameters` of what
it keeps of the requests; `launch`, which waits for nothing; and `finish`, later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_impl.interfaces import Asking, Sampled, SamplingParams, TokenLogprobs
from reference_impl.sampling.masks import Allowed, masked
from reference_impl.sampling.penalties import Penalties, TokenCounts, has_penalties, penalised
from reference_impl.sampling.philox import uniform
from reference_impl.staging import Arrays, mark, to_device, to_host

# Of each request; seed: 64 bits as a signed number.
COLUMNS: dict[str, type[np.generic]] = {
    "temperature": np.float32, "top_p": np.float32, "min_p": np.float32,
    "top_k": np.int64, "seed": np.int64, "sample_index": np.int64,
}  # fmt: skip


@dataclass(frozen=True)
class Parameters:
    """What sampling needs of the requests of a step."""

    params: tuple[SamplingParams, ...]
    arrays: Arrays  # [rows] each: COLUMNS, and position, how many tokens the request has there
    penalties: Penalties | None  # None: no row has any
    allowed: Allowed | None = None  # None: every row may have any token

    @property
    def needs_logits(self) -> bool:
        """Whether tokens cannot be chosen from the arrays alone, or are not all that is wanted."""
        return self.penalties is not None or any(p.logprobs is not None for p in self.params)


def columns(params: Sequence[SamplingParams], seeds: Sequence[int], sample_indices: Sequence[int]) -> Arrays:
    """As COLUMNS says, of requests."""
    values: dict[str, Sequence[Any]] = {
        "temperature": [p.temperature for p in params],
        "top_p": [p.top_p for p in params],
        "min_p": [p.min_p for p in params],
        "top_k": [p.top_k for p in params],
        "seed": [seed - (seed >> 63 << 64) for seed in seeds],
        "sample_index": sample_indices,
    }
    with np.errstate(over="ignore"):  # a temperature above float32 is infinite
        return {name: np.array(values[name], dtype) for name, dtype in COLUMNS.items()}


@dataclass(frozen=True)
class Launched:
    """A sampling that runs. tokens [rows] int64, on the device."""

    tokens: Tensor
    finish: Callable[[], Sampled]  # waits for it


class TorchSampler:
    """`sample`, and its parts."""

    captures = False  # are the tokens a function of what lies on the device alone, without host decisions?

    def __call__(self, logits: Tensor, requests: Sequence[Asking]) -> Sampled:
        """Chooses the next token of each request. logits [num_rows, vocab_size]."""
        return self.launch(logits, read(requests, logits.device)).finish()

    def launch(self, logits: Tensor, parameters: Parameters, on_device: Mapping[str, Tensor] | None = None) -> Launched:
        """on_device: parameters.arrays as tensors, if they are there already."""
        if on_device is None and self.captures:
            on_device = to_device(parameters.arrays, logits.device)
        scores = logits if parameters.penalties is None else penalised(logits, parameters.penalties)
        if parameters.allowed is not None:
            scores = masked(scores, parameters.allowed)
        return launched(logits, self.choose(scores, parameters, on_device), parameters.params)

    def choose(self, scores: Tensor, parameters: Parameters | None, on_device: Mapping[str, Tensor] | None) -> Tensor:
        """One token per row of scores [num_rows, vocab_size], int64. If it `captures`: from on_device alone."""
        assert parameters is not None
        if all(p.temperature == 0 for p in parameters.params):
            return scores.argmax(dim=-1)
        arrays = parameters.arrays
        u = uniform(arrays["seed"].view(np.uint64), arrays["sample_index"], arrays["position"])
        return draw(probabilities(scores, parameters.params), to_device({"u": u}, scores.device)["u"])


sample = TorchSampler()


def read(requests: Sequence[Asking], device: torch.device) -> Parameters:
    """What a worker has in its slots, of requests that are in none."""
    params, counts = tuple(r.sampling for r in requests), TokenCounts(device)
    for place, request in enumerate(requests):
        if has_penalties(request.sampling):
            counts.open(place, request.tokens, request.num_prompt_tokens)
    arrays = columns(params, [r.seed for r in requests], [r.sample_index for r in requests])
    arrays["position"] = np.array([len(r.tokens) for r in requests], np.int64)
    return Parameters(params, arrays, counts.of(range(len(params)), params))


def launched(logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> Launched:
    """Tokens and, where they were asked for, log-probabilities start on their way to the host."""
    device, asked = tokens.device, [row for row, p in enumerate(params) if p.logprobs is not None]
    on_host = [to_host(tokens)]
    if asked:
        rows = to_device({"rows": np.array(asked)}, device)["rows"]
        logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
        most = min(max(p.logprobs or 0 for p in params), logits.shape[1])
        on_host += map(to_host, (logprobs.gather(1, tokens[rows, None])[:, 0], *logprobs.topk(most)))
    wait = mark(device)

    def finish() -> Sampled:
        wait()
        chosen = on_host[0].tolist()
        reports: list[TokenLogprobs | None] = [None] * len(chosen)
        for row, own, values, ids in zip(asked, *(t.tolist() for t in on_host[1:]), strict=True) if asked else ():
            k = params[row].logprobs
            reports[row] = TokenLogprobs(chosen[row], own, tuple(zip(ids[:k], values[:k], strict=True)))
        return Sampled(chosen, reports)

    return Launched(tokens, finish)


def apply_penalties(logits: Tensor, requests: Sequence[Asking]) -> Tensor:
    """Repetition (CTRL, Keskar et al. 2019), presence and frequency penalties; a new tensor where any is set."""
    penalties = read(requests, logits.device).penalties
    return logits if penalties is None else penalised(logits, penalties)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution that each row is drawn from: [num_rows, vocab_size], float32 (float64 stays), rows sum to 1.

    Temperature 0 gives all mass to the largest logit (the first, if several are equal).
    """
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32

    def column(values: Sequence[float]) -> Tensor:
        with np.errstate(over="ignore"):
            array = np.array(values, np.float64).astype(np.float64 if dtype is torch.float64 else np.float32)
        return to_device({"column": array}, logits.device)["column"][:, None]

    greedy = column([p.temperature == 0 for p in params]).bool()
    # Largest score 0 before the division: a tiny temperature then gives 0 and -inf, not inf - inf.
    temperature = column([p.temperature or 1.0 for p in params]).clamp(torch.finfo(dtype).tiny, torch.finfo(dtype).max)
    scores = logits.to(dtype)
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
    if any(p.top_k or p.top_p < 1 for p in params):
        top_k = column([min(p.top_k or logits.shape[1], logits.shape[1]) for p in params])
        scores = _keep_top(scores, top_k, column([p.top_p for p in params]))
    probs = scores.softmax(dim=-1)
    if any(p.min_p for p in params):
        min_p = column([p.min_p for p in params])
        kept = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0)
        probs = torch.where(min_p > 0, kept / kept.sum(dim=-1, keepdim=True), probs)  # other rows: the same bits
    one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1)
    return torch.where(greedy, one_hot, probs)


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the top k, then outside the smallest set whose mass reaches top_p; top_k and top_p are columns.

    Exactly k stay: of equal scores at the edge the lower token id. Top-p counts mass within the top k.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    ordered = ordered.masked_fill(rank[None] >= top_k, -torch.inf)
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
