"""Hidden states of a prompt instead of a sampled token: its last token's, or the sum over all tokens, for the mean."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.slots import Slots
from reference_impl.core.staging import to_device, to_host
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart
from reference_impl.interfaces import AttentionBackend, Batch, KVCache

Pools = Mapping[int, tuple[int, "array[float]"]]  # see `Reply.pooled`


@dataclass(frozen=True)
class Pooled:
    """The rows of a step whose hidden states are asked for.

    rows: (row of the step, first position, where its hidden states begin and end among those of the step's logits).
    sampling: which of the step's logits are sampled from.
    """

    rows: list[tuple[int, int, int, int]]
    sampling: NDArray[np.int64]


def add_pooled(host: HostBatch, slots: Slots) -> Pooled | None:
    """Adds to the batch's logits_indices, in their order, the tokens whose hidden states are asked for; None, and
    nothing changed, if none are."""
    found: list[tuple[int, int, int, int]] = []  # (row of the step, first position, first and last token + 1)
    ends = host.arrays["query_start_loc"][1:].tolist()
    for at, slot in enumerate(host.slots):
        request, end, num = slots.host[slot], host.context_lens[at], host.query_lens[at]
        if request.pooling == "last":
            num = int(end == request.num_prompt_tokens)
        if request.pooling is not None and num:
            found.append((host.order[at], end - num, ends[at] - num, ends[at]))
    if not found:
        return None
    wanted = np.concatenate([np.arange(first, end) for *_, first, end in found])
    sampled = host.arrays["logits_indices"]
    both = host.arrays["logits_indices"] = np.union1d(sampled, wanted)
    rows = []
    for row, start, first, end in found:
        begins, ends_at = np.searchsorted(both, (first, end)).tolist()
        rows.append((row, start, begins, ends_at))
    return Pooled(rows, np.searchsorted(both, sampled))


def launch_pools(hidden: Tensor, pooled: Pooled) -> Callable[[], Pools]:
    """Starts to copy the sums of pooled hidden states to the host. Returns a function that gives them once the device
    is done. hidden [logits, hidden_size], normalised."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    sums = to_host(torch.stack([hidden[first:end].sum(0, dtype=dtype) for *_, first, end in pooled.rows]))

    def finish() -> Pools:
        values = sums.double().numpy()
        return {row: (start, array("d", values[i].tobytes())) for i, (row, start, *_) in enumerate(pooled.rows)}

    return finish


def of_sampling(hidden: Tensor, pooled: Pooled) -> Tensor:
    return hidden[to_device({"sampling": pooled.sampling}, hidden.device)["sampling"]]


class PoolPart(StepPart):
    def lay_out(self, run: StepRun) -> None:
        pooled = add_pooled(run.batch, run.worker.slots)
        if pooled is not None:
            run.model = PoolingModel(run.model, pooled, run.reports)


class PoolingModel:
    """Stands before a model for one step: hidden states of prompts are summed and reported, others become logits."""

    def __init__(self, model: Any, pooled: Pooled, reports: dict[str, Callable[[], Any]]):
        self.model, self.pooled, self.reports = model, pooled, reports

    def __call__(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        hidden = self.model.hidden_states(batch, kv_cache, attention)
        self.reports["pooled"] = launch_pools(hidden, self.pooled)
        logits: Tensor = self.model.logits(of_sampling(hidden, self.pooled))
        return logits
