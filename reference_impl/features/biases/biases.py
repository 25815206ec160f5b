"""Changes to single tokens' scores: what `logit_bias` adds, what `allowed_token_ids` leaves, and what `min_tokens`
rules out for now.

All depend on the request and the position alone: nothing is kept from step to step, and a step that is computed again,
ahead, or with wrong drafts before a position gets the same changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.staging import Arrays, to_device
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart
from reference_impl.interfaces import Opened, SamplingParams


def bias_arrays(params: Sequence[SamplingParams]) -> Arrays | None:
    """The biased tokens in logits with these parameters: row, token, bias [B]. None: there are none."""
    found = [(row, token, bias) for row, p in enumerate(params) for token, bias in (p.logit_bias or {}).items()]
    return _arrays(found, ("row", "token", "bias"))


def allowed_arrays(params: Sequence[SamplingParams]) -> Arrays | None:
    """The allowed tokens in logits with allowed_token_ids: row, token [A]. None: no logits have them."""
    found = [(row, token) for row, p in enumerate(params) for token in p.allowed_token_ids or ()]
    return _arrays(found, ("row", "token"))


def floor_arrays(params: Sequence[SamplingParams], prompts: Sequence[int], ends: Sequence[int]) -> Arrays | None:
    """The tokens that would end a text, in logits whose requests have min_tokens: row, token, and floor, the first
    position that the token may have, [F]. None: there are none.

    prompts: the length of each prompt in tokens. ends: the model's end tokens.
    """
    found = [
        (row, token, prompt + p.min_tokens)
        for row, (p, prompt) in enumerate(zip(params, prompts, strict=True))
        if p.min_tokens
        for token in sorted({*p.stop_token_ids, *(() if p.ignore_eos else ends)})
    ]
    return _arrays(found, ("row", "token", "floor"))


def _arrays(found: Sequence[tuple[float, ...]], names: Sequence[str]) -> Arrays | None:
    return dict(zip(names, map(np.array, zip(*found, strict=True)), strict=True)) if found else None


def biased(logits: Tensor, arrays: Arrays) -> Tensor:
    """The logits [rows, vocab_size] with the biases added: a new tensor, float32 at least. arrays: `bias_arrays`, each
    (row, token) at most once."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    t = to_device(arrays, logits.device)
    at = t["row"], t["token"]
    return scores.index_put_(at, scores[at] + t["bias"].to(scores.dtype))


def restricted(scores: Tensor, arrays: Arrays) -> Tensor:
    """The scores [rows, vocab_size] with -inf, in the rows of arrays, for all but their tokens: a new tensor. arrays:
    `allowed_arrays`."""
    t = to_device(arrays, scores.device)
    at = t["row"], t["token"]
    others = scores.index_fill(0, t["row"], -torch.inf)
    return others.index_put_(at, scores[at])


def floored(scores: Tensor, arrays: Arrays, position: Tensor) -> Tensor:
    """The scores [rows, vocab_size] with -inf where a token would end its text too early: a new tensor. position
    [rows]: that of the token sampled there; arrays: `floor_arrays`, without tokens that the model does not have."""
    t = to_device(arrays, scores.device)
    at = t["row"], t["token"]
    kept = scores[at].masked_fill(position[t["row"]] < t["floor"], -torch.inf)
    return scores.index_put(at, kept)


def moved(scores: Tensor, requests: Sequence[Opened]) -> Tensor:
    """The scores [rows, vocab_size] of these requests with their `logit_bias`."""
    arrays = bias_arrays([request.sampling for request in requests])
    return scores if arrays is None else biased(scores, arrays)


def left_over(scores: Tensor, requests: Sequence[Opened], ends: Sequence[int], position: Tensor) -> Tensor:
    """The scores [rows, vocab_size] of these requests with -inf for what `allowed_token_ids` and `min_tokens` rule out.
    ends: see `floor_arrays`; position: see `floored`."""
    params = [request.sampling for request in requests]
    allowed = allowed_arrays(params)
    if allowed is not None:
        scores = restricted(scores, allowed)
    arrays = floor_arrays(params, [request.num_prompt_tokens for request in requests], ends)
    return scores if arrays is None else floored(scores, arrays, position)


class BiasPart(StepPart):
    def needs_logits(self, run: StepRun) -> bool:
        return True

    def move_scores(self, run: StepRun) -> None:
        run.scores = moved(run.scores, requests_of(run))


class ExclusionPart(StepPart):
    def __init__(self, ends: Sequence[int]):
        self.ends = ends

    def needs_logits(self, run: StepRun) -> bool:
        return True

    def move_scores(self, run: StepRun) -> None:
        run.scores = left_over(run.scores, requests_of(run), self.ends, run.tensors["sample_positions"])


def requests_of(run: StepRun) -> list[Opened]:
    """The request of each of the step's logits."""
    return [run.worker.slots.host[run.batch.slots[row]] for row in run.batch.sampling]
