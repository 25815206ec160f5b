"""Sampling outside of a worker, by the call that `interfaces.Sampler` describes, which waits: biases, penalties, with
texts counted again for each call, and the choice. (What min_tokens rules out is ruled out before.)"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from reference_impl.core.sampler import SETTINGS, TorchSampler, report, settings_of
from reference_impl.core.staging import to_device
from reference_impl.features.biases.biases import bias_arrays, biased
from reference_impl.features.penalties.counts import TokenCounts, penalised
from reference_impl.features.penalties.worker import has_penalties
from reference_impl.interfaces import Asking, Sampled


def sampled(sampler: TorchSampler, logits: Tensor, requests: Sequence[Asking]) -> Sampled:
    """The next token of each request, chosen by `sampler`. logits [len(requests), vocab_size]."""
    settings = np.array([settings_of(r.sampling, r.seed, r.sample_index) for r in requests], SETTINGS)
    lengths = np.array([r.num_tokens for r in requests], np.int64)
    columns = to_device({**sampler.columns(settings, lengths), "sample_positions": lengths}, logits.device)
    tokens = sampler.choose(apply_penalties(logits, requests), columns)
    logprobs = report(logits, tokens, settings["logprobs"])
    return Sampled(tokens.tolist(), logprobs())  # waits for the tokens, and for all that was launched before


def apply_penalties(logits: Tensor, requests: Sequence[Asking]) -> Tensor:
    """The logits with logit_bias, then repetition (CTRL, Keskar et al. 2019), presence and frequency penalties: a new
    tensor where any is set."""
    arrays = bias_arrays([request.sampling for request in requests])
    if arrays is not None:
        logits = biased(logits, arrays)
    counts = TokenCounts(logits.device)
    for place, request in enumerate(requests):
        if has_penalties(request.sampling):
            counts.open(place, request.tokens, request.num_prompt_tokens)
    penalties = counts.of(range(len(requests)), [r.sampling for r in requests])
    return logits if penalties is None else penalised(logits, penalties)
