"""The scores that a draft model's tokens are drawn from: its logits, changed like the target's will be.

A request's biases and penalties, what its parameters rule out, and its grammar where its masks can be asked for
(`grammars/drafts.py`), are applied to a draft's logits, too: without them it would draft tokens whose scores are low in
the target. Verification is right for any q; this one is closer to p. Penalties ask how often the text has each token:
what was sampled is counted already, and behind it come the drafts of this step before a position, as in verification.

Logits that are not numbers are counted: their drafts are right by chance alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.slots import Slots
from reference_impl.core.staging import to_device
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import DraftPositions

# (logits [rows, vocab_size]; slots [rows]; positions [rows], which are drafted; the drafts of this step before each of
# them: how many, that lie in its slot, or which, [rows, number]) -> scores of the same shape.
DraftScores = Callable[[Tensor, Sequence[int], Tensor, int | Tensor], Tensor]


def moved_as_the_targets(run: StepRun, logits: Tensor, at: DraftPositions) -> Tensor:
    """A draft model's logits, changed by the worker's features like the target's. A sampler that is asked changes
    scores itself, and it is not known how: then the logits stay as they are."""
    if not isinstance(run.worker.sampler, TorchSampler):
        return logits
    scores = logits
    for feature in run.worker.hooks.features:
        if not feature.slots.isdisjoint(at.slots):
            scores = feature.move_draft_scores(scores, at)
    return scores


def texts_before(slots: Sequence[int], positions: Tensor, before: int | Tensor, of: Slots) -> list[tuple[int, ...]]:
    """The drafts of this step before each position, on the host. Arguments: see `DraftScores`."""
    if not isinstance(before, Tensor):
        back = torch.arange(before, 0, -1, device=of.device)
        slot = to_device({"slot": np.array(slots)}, of.device)["slot"]
        before = of.tokens[slot[:, None], positions[:, None] - back]
    return [tuple(drafts) for drafts in before.tolist()]


def not_numbers(logits: Tensor) -> Tensor:
    """How many rows of logits [rows, vocab_size] have a NaN, positive infinity, or only negative infinity (which tokens
    outside the draft vocabulary have): 0-dimensional int64, on the device."""
    return (~torch.isfinite(logits.amax(-1))).sum()
