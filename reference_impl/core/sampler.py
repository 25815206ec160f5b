"""From logits to tokens: temperature, top-k, top-p, min-p, one draw.

Rows are independent: each has its own settings, and its own uniform number from `philox`. Nothing waits for the device:
a worker copies what `columns` gives with the batch, before the forward pass, and calls `choose` behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.philox import uniform
from reference_impl.core.staging import Arrays, to_device, to_host
from reference_impl.interfaces import SamplingParams, TokenLogprobs
from reference_impl.interfaces.sampling_fields import BY_SAMPLER

# How a request is sampled. seed: 64 bits as a signed number. logprobs: alternatives to report, or -1.
SETTINGS = np.dtype(
    [*((field.name, "f8" if field.kind is float else "i8") for field in BY_SAMPLER),
     ("seed", "i8"), ("sample_index", "i8"), ("logprobs", "i8")]
)  # fmt: skip
_fields = attrgetter(*(field.name for field in BY_SAMPLER))
Settings = NDArray[np.void]  # of SETTINGS


def settings_of(p: SamplingParams, seed: int, sample_index: int) -> tuple[float, ...]:
    """The values of one entry in an array of SETTINGS."""
    logprobs = -1 if p.logprobs is None else p.logprobs
    return *_fields(p), seed - (seed >> 63 << 64), sample_index, logprobs


class TorchSampler:
    """Samples with torch's operators. A random number depends on seed, sample and position alone."""

    reads: Collection[str] = frozenset({"temperature", "top_k", "top_p", "min_p"})  # fields of SamplingParams
    captures = False  # whether `choose` goes by what lies on the device alone, positions included

    def columns(self, settings: Settings, lengths: NDArray[np.int64]) -> Arrays:
        """The arrays that `choose` needs for rows with these settings, [rows] each; none if all are greedy.

        lengths [rows]: how many tokens the request has, which is the position of the one to be sampled.
        """
        if not settings["temperature"].any():
            return {}
        u = uniform(settings["seed"].view(np.uint64), settings["sample_index"], lengths)
        found: Arrays = {"u": u, "temperature": settings["temperature"]}
        if settings["top_k"].any() or settings["top_p"].min() < 1:
            found |= {"top_k": settings["top_k"], "top_p": settings["top_p"]}
        if settings["min_p"].any():
            found["min_p"] = settings["min_p"]
        return found

    def choose(self, scores: Tensor, t: Mapping[str, Tensor]) -> Tensor:
        """The tokens [rows] int64, one for each row of scores [rows, vocab_size]. t: the `columns`, on the device."""
        if "u" not in t:
            return scores.argmax(dim=-1)
        return draw(distribution(scores, t), t["u"])


def report(logits: Tensor, tokens: Tensor, wanted: NDArray[np.int64]) -> Callable[[], list[TokenLogprobs | None]]:
    """Starts to copy log-probabilities to the host. Returns a function that gives them once the device is done.

    wanted [rows]: how many alternatives to report; -1: no report for this row.
    """
    (asked,) = (wanted >= 0).nonzero()
    if not len(asked):
        return lambda: [None] * len(wanted)
    rows = to_device({"rows": asked}, tokens.device)["rows"]
    logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
    chosen = tokens[rows]
    most = min(int(wanted.max()), logits.shape[1])
    on_host = [to_host(t) for t in (chosen, logprobs.gather(1, chosen[:, None])[:, 0], *logprobs.topk(most))]

    def finish() -> list[TokenLogprobs | None]:
        reports: list[TokenLogprobs | None] = [None] * len(wanted)
        for row, token, own, values, ids in zip(asked.tolist(), *(t.tolist() for t in on_host), strict=True):
            k = int(wanted[row])
            reports[row] = TokenLogprobs(token, own, tuple(zip(ids[:k], values[:k], strict=True)))
        return reports

    return finish


def distribution(logits: Tensor, t: Mapping[str, Tensor]) -> Tensor:
    """The distribution that each row is drawn from: [rows, vocab_size], float32 (float64 stays), rows sum to 1.
    Temperature 0 gives all mass to the largest logit, the first of equal ones.
    t: columns on the device: temperature; top_k and top_p, and min_p, where any row has them."""
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    greedy = t["temperature"][:, None] == 0
    temperature = t["temperature"][:, None].to(dtype).clamp(torch.finfo(dtype).tiny, torch.finfo(dtype).max)
    scores = logits.to(dtype)
    # Largest score 0 before the division: a tiny temperature then gives 0 and -inf, not inf - inf.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
    if "top_k" in t:
        scores = _keep_top(scores, t["top_k"][:, None], t["top_p"][:, None].to(dtype))
    probs = scores.softmax(dim=-1)
    if "min_p" in t:
        min_p = t["min_p"][:, None].to(dtype)
        kept = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0)
        probs = torch.where(min_p > 0, kept / kept.sum(dim=-1, keepdim=True), probs)  # other rows: the same bits
    one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1)
    return torch.where(greedy, one_hot, probs)


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The scores with -inf outside the top k (0: all), then outside the smallest set whose mass reaches top_p; both
    [rows, 1].

    Exactly k stay: among equal scores at the edge the lowest token ids. Top-p counts mass within the top k.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    ordered = ordered.masked_fill((rank[None] >= top_k) & (top_k > 0), -torch.inf)
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    # A token stays while the mass before it is below top_p; the first always stays.
    ordered = ordered.masked_fill((mass_before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u (inverse transform sampling): [rows] int64. probs [rows,
    vocab_size], u [rows]."""
    cumulative = probs.double().cumsum(dim=-1)
    target = u.double()[:, None] * cumulative[:, -1:]  # the sum may miss 1 by rounding
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[1] - 1)
