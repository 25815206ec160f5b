"""What guesses of a model are drawn from: its logits, moved as the target's will be.

A request's biases and penalties, what its parameters rule out, and its grammar where its masks can be asked for
(`grammars/guesses.py`), are applied to a draft's logits, too: without them
it guesses tokens that the target's scores have sunk. Any q is verified as rightly; this one is nearer to p. Penalties
ask how often the text has each token. Behind the counts of `penalties/counts.py`, which hold what was sampled, come the
guesses of this step before a position, as they come in verification.

Logits that are not numbers are counted: their guesses are right by chance alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.slots import Slots
from reference_impl.core.staging import to_device
from reference_impl.features.biases.biases import left_over, moved
from reference_impl.features.biases.worker import BiasWorker
from reference_impl.features.penalties.counts import Penalties, penalised
from reference_impl.features.penalties.worker import PenaltyWorker

# (logits [rows, vocab_size]; slots [rows]; positions [rows], which are guessed; the guesses of this step before each of
# them: how many, that lie in its slot, or which, [rows, number]) -> scores of the same shape.
GuessScores = Callable[[Tensor, Sequence[int], Tensor, int | Tensor], Tensor]


class ScoringWorker(BiasWorker, PenaltyWorker):
    """Moves a draft's logits. A sampler that is asked does so by itself, and keeps no counts: there they stay."""

    def guess_scores(self, logits: Tensor, slots: Sequence[int], positions: Tensor, before: int | Tensor) -> Tensor:
        """As `GuessScores`."""
        if not isinstance(self.sampler, TorchSampler):
            return logits
        requests, scores = [self.slots.host[slot] for slot in slots], logits
        has_biases = not self.biased.isdisjoint(slots)
        if has_biases:
            scores = moved(scores, requests)
        if not self.counts.places.keys().isdisjoint(slots):
            penalties = self.counts.of(slots, [request.sampling for request in requests])
            assert penalties is not None  # a slot has counts only where its request has penalties
            scores = penalised(scores, penalties, guesses_before(penalties, slots, positions, before, self.slots))
        return left_over(scores, requests, self.ends, positions) if has_biases else scores


def guesses_before(
    penalties: Penalties, slots: Sequence[int], positions: Tensor, before: int | Tensor, of: Slots
) -> tuple[Tensor, Tensor] | None:
    """As `penalised` takes them: `before` [rows, number], or the tokens on so many places before each position."""
    rows = penalties.arrays["rows"]
    if isinstance(before, Tensor):
        t = to_device({"rows": rows, "which": np.repeat(np.arange(len(rows)), before.shape[1])}, of.device)
        return (t["which"], before[t["rows"]].flatten()) if before.shape[1] else None
    if not before:
        return None
    which, back = np.repeat(np.arange(len(rows)), before), np.tile(np.arange(before, 0, -1), len(rows))
    arrays = {"which": which, "row": rows[which], "slot": np.array(slots)[rows[which]], "back": back}
    t = to_device(arrays, of.device)
    return t["which"], of.tokens[t["slot"], positions[t["row"]] - t["back"]].long()


def texts_before(slots: Sequence[int], positions: Tensor, before: int | Tensor, of: Slots) -> list[tuple[int, ...]]:
    """On the host: the guesses of this step before each position; as of `GuessScores`."""
    if not isinstance(before, Tensor):
        back = torch.arange(before, 0, -1, device=of.device)
        slot = to_device({"slot": np.array(slots)}, of.device)["slot"]
        before = of.tokens[slot[:, None], positions[:, None] - back]
    return [tuple(guesses) for guesses in before.tolist()]


def not_numbers(logits: Tensor) -> Tensor:
    """How many rows of logits [rows, vocab_size] have a NaN, positive infinity, or nothing but negative infinity, which
    tokens that a draft does not guess have: 0-dimensional int64, on the device."""
    return (~torch.isfinite(logits.amax(-1))).sum()
