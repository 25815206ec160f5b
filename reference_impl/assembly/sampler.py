"""The sampler in torch with all that a request can ask for: temperature, filters, penalties, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from reference_impl.core.sampler import SETTINGS, TorchSampler, distribution, settings_of
from reference_impl.core.staging import to_device
from reference_impl.interfaces import Asking, Sampled, SamplingParams


class CalledSampler(TorchSampler):
    """A `TorchSampler` that can also be called as a `Sampler`."""

    def __call__(self, logits: Tensor, requests: Sequence[Asking]) -> Sampled:
        from reference_impl.features.penalties.sampler import sampled

        return sampled(self, logits, requests)


sample = CalledSampler()


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution that rows with these parameters are drawn from: logits [rows, vocab_size] -> the same shape."""
    settings = np.array([settings_of(p, 0, 0) for p in params], SETTINGS)
    columns = TorchSampler().columns(settings, np.zeros(len(params), np.int64))
    return distribution(logits, to_device({"temperature": settings["temperature"], **columns}, logits.device))
