"""Medusa heads: small heads that each draft the token at another distance, from one hidden state of the target (Cai et
al. 2024).

    h = hidden[p]                         the target's, after its last norm: it gave the distribution of token p + 1
    head_j = h + SiLU(W_j h + b_j)        -> the target's lm_head -> token p + 2 + j

No head knows which token was sampled at p + 1, nor what the heads before it drafted: draft token j is drawn from head j
alone, so drafts are right more rarely than those of a model that is run on its own (draft_model.py, feature_head.py).
In return there are no keys and values, and no pass after another: all drafts of a step are one product with the W_j,
and one with lm_head. Cai et al. verify the heads' best tokens as a tree; here they are a chain.

    end of a step     the hidden state of the last token kept of each row stays in `ahead`
    next step         rows that get drafts have them all drawn from it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.core.batch import HostBatch, lay_out
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.slots import Slots
from reference_impl.features.speculative.draft_model import Replay, by_pass, slots_of, with_drawn
from reference_impl.features.speculative.draft_scores import DraftScores
from reference_impl.interfaces import StepRow


@dataclass(frozen=True)
class MedusaConfig:
    """The sizes of Medusa heads. hidden_size, vocab_size: the target's."""

    hidden_size: int
    vocab_size: int
    num_heads: int


class MedusaHeads:
    """The weights of Medusa heads. heads: all W_j and b_j, stacked, from hidden_size to num_heads x hidden_size."""

    method = "medusa"  # see EngineConfig.speculative

    def __init__(self, config: MedusaConfig, heads: Linear, dtype: torch.dtype, device: torch.device):
        self.config, self.heads, self.dtype, self.device = config, heads, dtype, device
        self._target: Any = None

    def follow(self, target: Decoder) -> None:
        """Makes the heads draft for this model, whose lm_head they use. ValueError if they draft for another one."""
        if self._target is not None and self._target.embedding is not target.embedding:
            raise ValueError("these Medusa heads draft for another model already: load_medusa_heads once more")
        self._target = target

    def hidden_states(self, features: Tensor) -> Tensor:
        """The heads' hidden states: features [rows, hidden_size], the target's -> [rows, num_heads, hidden_size]."""
        h = features.to(self.dtype)
        return h[:, None] + F.silu(self.heads(h)).view(len(h), self.config.num_heads, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits by the target's lm_head, [rows, vocab_size], in its dtype."""
        found: Tensor = self._target.logits(hidden.to(self._target.dtype))
        return found


@dataclass(frozen=True)
class MedusaDraft:
    """Heads at work. ahead [slots + 1, hidden_size]: for each slot the target's hidden state from which its next drafts
    come. logits_dtype: the target's, which the sampler expects."""

    model: MedusaHeads
    logits_dtype: torch.dtype
    ahead: Tensor
    distance = 0  # see `DraftModel`
    own_cache = None
    attention = None

    def lay_out(self, rows: Sequence[StepRow], slots: Slots) -> list[HostBatch]:
        """One batch of all drafts of a step's rows, which begin at what is computed in their slots; none without
        drafts. For R rows with D drafts in all its arrays are slots [R]; row, nth, sampling_slots [D], one for each
        draft token."""
        drafted = [StepRow(row.slot, row.start, 1, True, row.num_drafts - 1) for row in rows if row.num_drafts]
        if not drafted:
            return []
        batch = lay_out(drafted, slots)  # a row of k tokens, which has k logits
        row, slot = np.array(batch.sampling), batch.arrays["slots"]
        nth = np.concatenate([np.arange(num) for num in batch.query_lens])
        return [replace(batch, arrays={"slots": slot, "row": row, "nth": nth, "sampling_slots": slot[row]})]

    def propose(
        self, passes: Sequence[HostBatch], t: Mapping[str, Tensor], slots: Slots, sampler: TorchSampler,
        scores: DraftScores, replay: Replay | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Draws the drafts and writes them behind the tokens of their slots. t: with the `arrays_of` the passes, on the
        device. Returns q: see `DraftModel.propose`. Penalties of draft token j count the text alone: the drafts before
        it are not drawn yet, unless they are made `one_by_one`. The one pass, of two products, is not replayed."""
        q = None
        for number, (batch, mine) in enumerate(zip(passes, by_pass(t, len(passes)), strict=True)):
            hidden = self.model.hidden_states(self.ahead.index_select(0, mine["slots"]))[mine["row"], mine["nth"]]
            logits = self.model.logits(hidden).to(self.logits_dtype)
            # Behind a row's one known token, which is not computed yet.
            mine["sample_positions"] = slots.computed.index_select(0, mine["sampling_slots"]) + 1 + mine["nth"]
            moved = scores(logits, slots_of(batch), mine["sample_positions"], number)
            slots.put(mine, sampler.choose(moved, mine))
            q = with_drawn(q, moved, mine, t)
        return q

    def keep_up(
        self, batch: HostBatch, t: Mapping[str, Tensor], slots: Slots, features: Tensor, wrong: Tensor | None
    ) -> None:
        """Keeps the hidden state of the last token kept of each row. Arguments: see `FeatureDraft.keep_up`."""
        last = t["query_start_loc"][1:].long() - 1
        kept = features.index_select(0, last if wrong is None else last - wrong)
        self.ahead.index_copy_(0, t["slots"], kept.to(self.ahead.dtype))


def one_by_one(passes: Sequence[HostBatch]) -> list[HostBatch]:
    """The pass of `MedusaDraft.lay_out` cut into one for each head, for draft tokens that depend on those before."""
    found = []
    for batch in passes:
        row, nth = batch.arrays["row"], batch.arrays["nth"]
        for number in range(nth.max() + 1):
            (mine,) = (nth == number).nonzero()
            arrays = batch.arrays | {name: batch.arrays[name][mine] for name in ("row", "nth", "sampling_slots")}
            rows, lengths, settings = tuple(row[mine].tolist()), batch.lengths[mine], batch.settings[mine]
            found.append(replace(batch, arrays=arrays, sampling=rows, lengths=lengths, settings=settings))
    return found
