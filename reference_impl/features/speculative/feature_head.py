"""A feature head: one layer that drafts ahead from the target's own hidden states (EAGLE, Li et al. 2024; trained as
EAGLE-3, 2025).

    x[p] = fc([norm(embedding of token p + 1), hidden[p]])      hidden[p]: the target's, after its last norm
    hidden'[p + 1] = norm(layer(x)[p])                          -> the target's lm_head -> token p + 2

A module for multi-token prediction, like DeepSeek-V3's (2024, section 2.2), differs in one norm, that of the hidden
state, and is run the same way (`hidden_norm`; its names there: enorm, hnorm, eh_proj):

    x[p] = fc([norm(embedding of token p + 1), norm(hidden[p])])

So it knows what the target knows of position p, and the token that was sampled there. Behind the first draft token it
is run on its own hidden' in place of the target's. Embedding and lm_head are the target's; its keys and values lie in a
cache of its own with the target's blocks, by the same ids, like a draft model's (draft_model.py).

    end of a step     all of its tokens, with the target's hidden states: the last one kept of each row stays in `ahead`
    next step         draft token 0 is drawn from what is in `ahead`; for each further one the head runs once, over the
                      rows that get one

Positions of drafts are computed again at the end of the step that verified them, so what wrong drafts left in the
cache is overwritten. An entry depends on the token behind its own: a prompt that shares a cached block and goes on
differently reads one entry of another text; and for a held request, whose tokens the host chooses, entries may be those
of the sampled tokens. That makes drafts a little worse.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.core.batch import HostBatch, as_batch
from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.slots import Slots
from reference_impl.features.speculative.draft_model import (
    Replay,
    by_pass,
    lay_out_ahead,
    one_further,
    slots_of,
    with_drawn,
)
from reference_impl.features.speculative.draft_scores import DraftScores
from reference_impl.interfaces import AttentionBackend, Batch, KVCache, KVSpec, StepRow
from reference_impl.models.quantization.head import GivesRows


class FeatureHead:
    """The weights of a feature head. layer: a decoder of one layer, of the target's family and hidden_size, whose
    embedding is not used. fc: from 2 x hidden_size to hidden_size; embed_norm, hidden_norm [hidden_size].
    draft_tokens [any] int64: the draft vocabulary, which all drafts are from (EAGLE-3; FR-Spec, Zhao et al. 2025): the
    most frequent tokens, so that lm_head has fewer rows. All others have q = 0, and verification is right all the same.
    None: all tokens."""

    def __init__(
        self, layer: Decoder, fc: Linear, embed_norm: Tensor, draft_tokens: Tensor | None = None,
        hidden_norm: Tensor | None = None,
    ):  # fmt: skip
        self.layer, self.fc, self.embed_norm, self.draft_tokens = layer, fc, embed_norm, draft_tokens
        self.hidden_norm = hidden_norm
        self.config, self.dtype, self.device, self.rotary = layer.config, layer.dtype, layer.device, layer.rotary
        self._target: Any = None
        self._features: Tensor | None = None  # of the batch that is being computed
        layer.embed = self._join  # type: ignore[method-assign]  # all else of a decoder's pass is as it is

    @property
    def method(self) -> str:
        """The value of EngineConfig.speculative for this head: "eagle" or "mtp"."""
        return "eagle" if self.hidden_norm is None else "mtp"

    def follow(self, target: Decoder) -> None:
        """Makes the head draft for this model, whose embedding and lm_head it uses. ValueError if it drafts for another
        one."""
        if self._target is not None and self._target.embedding is not target.embedding:
            raise ValueError("this feature head drafts for another model already: load_feature_head once more")
        self._target = self._output = target
        if self.draft_tokens is not None:
            self._output = with_few_tokens(target, self.draft_tokens)

    def hidden_states(self, batch: Batch, features: Tensor, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        """The head's hidden states after its last norm: features [num_tokens, hidden_size] ->
        [len(batch.logits_indices), hidden_size]."""
        self._features = features
        return self.layer.hidden_states(batch, kv_cache, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits by the target's lm_head, [rows, vocab_size], in its dtype; -inf outside the draft vocabulary."""
        found: Tensor = self._output.logits(hidden.to(self._target.dtype))
        if self.draft_tokens is None:
            return found
        everything = found.new_full((len(found), self._target.config.vocab_size), -torch.inf)
        return everything.index_copy_(1, self.draft_tokens, found)

    def _join(self, input_ids: Tensor) -> Tensor:
        assert self._features is not None
        embedded = self._target.embed(input_ids).to(self.dtype)
        embedded = self.layer.normalize(embedded, self.embed_norm, self.config.norm_eps)
        features = self._features.to(self.dtype)
        if self.hidden_norm is not None:
            features = self.layer.normalize(features, self.hidden_norm, self.config.norm_eps)
        found: Tensor = self.fc(torch.cat((embedded, features), -1))
        return found


def with_few_tokens(model: Decoder, tokens: Tensor) -> Decoder:
    """The model with logits for these tokens only; all else is shared."""
    few = copy.copy(model)
    if isinstance(model.head, GivesRows):
        few.lm_head = model.head.rows(tokens)
    else:
        few.lm_head = (model.embedding if model.lm_head is None else model.lm_head).index_select(0, tokens)
    few.head = F.linear
    return few


class KeepsHidden:
    """Stands for `model` in a worker and keeps the hidden states of all tokens of the last batch; other attributes are
    the model's."""

    def __init__(self, model: Any):
        self.model = model
        self.features: Tensor | None = None  # [num_tokens, hidden_size]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        found: Tensor = self.model.logits(self.hidden_states(batch, kv_cache, attention))
        return found

    def hidden_states(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        """The hidden states of `Decoder.hidden_states`; those of all tokens are kept in `features`."""
        all_of_them = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
        features: Tensor = self.model.hidden_states(replace(batch, logits_indices=all_of_them), kv_cache, attention)
        self.features = features
        return features[batch.logits_indices] if len(batch.logits_indices) < len(features) else features


@dataclass(frozen=True)
class FeatureDraft:
    """A head at work. kv_cache, kv_spec, attention: see `DraftModel`. ahead [slots + 1, hidden_size]: what the head
    gave last for each slot, from which its next draft token comes."""

    model: FeatureHead
    kv_cache: KVCache
    attention: AttentionBackend
    kv_spec: KVSpec
    logits_dtype: torch.dtype
    ahead: Tensor
    distance = 1  # see `DraftModel`: a pass gives what is two positions behind its own

    @property
    def own_cache(self) -> KVCache:
        """The head's own cache."""
        return self.kv_cache

    def lay_out(self, rows: Sequence[StepRow], slots: Slots) -> list[HostBatch]:
        """The passes over a step's rows, which begin at what is computed in their slots."""
        return lay_out_drafts(rows, slots)

    def propose(
        self, passes: Sequence[HostBatch], t: Mapping[str, Tensor], slots: Slots, sampler: TorchSampler,
        scores: DraftScores, replay: Replay | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Runs the passes and writes the drafts behind the tokens of their slots. t: with the `arrays_of` all passes,
        on the device. Returns q; q and replay: see `DraftModel.propose`."""
        q = None
        for number, (batch, mine) in enumerate(zip(passes, by_pass(t, len(passes)), strict=True)):
            rows = mine["slots"]
            found = replay(batch) if number and replay is not None else None
            if found is None:
                hidden = self.run(batch, mine, slots) if number else self.ahead.index_select(0, rows)
                logits = self.model.logits(hidden).to(self.logits_dtype)
            else:
                logits, hidden = found
            if number:
                self.ahead.index_copy_(0, rows, hidden)
            # `look_up` says the position behind the pass's own.
            mine["sample_positions"] = slots.computed.index_select(0, rows) + number + 1
            moved = scores(logits, slots_of(batch), mine["sample_positions"], number)
            slots.put(mine, sampler.choose(moved, mine))
            q = with_drawn(q, moved, mine, t)
        return q

    def run(self, batch: HostBatch, t: dict[str, Tensor], slots: Slots) -> Tensor:
        """The hidden states of a pass that is not the first: see `DraftModel.run`. `ahead` stays as it is."""
        before = self.ahead.index_select(0, t["slots"])
        t |= slots.look_up(t, max(batch.context_lens))
        t["input_ids"] = self._next_tokens(t, slots)
        return self.model.hidden_states(as_batch(batch, t, [self.kv_spec]), before, self.kv_cache, self.attention)

    def run_nodes(self, batch: HostBatch, t: dict[str, Tensor], slots: Slots, tokens: Tensor, before: Tensor) -> Tensor:
        """The hidden states [logits, hidden_size] of a pass over nodes of trees. before [num_tokens, hidden_size]:
        those of their parents."""
        t |= slots.look_up(t, max(batch.context_lens))
        t["input_ids"] = tokens
        return self.model.hidden_states(as_batch(batch, t, [self.kv_spec]), before, self.kv_cache, self.attention)

    def keep_up(
        self, batch: HostBatch, t: Mapping[str, Tensor], slots: Slots, features: Tensor, wrong: Tensor | None
    ) -> None:
        """Computes all tokens of the step after the target has. t: the arrays of the step's batch, with what was looked
        up. features: the target's hidden states. wrong [rows]: how many of a row's tokens are drafts that were not
        kept; None: there are none."""
        last = t["query_start_loc"][1:].long() - 1
        t = {**t, "input_ids": self._next_tokens(t, slots)}
        t["logits_indices"] = last if wrong is None else last - wrong
        found = as_batch(batch, t, [self.kv_spec])
        hidden = self.model.hidden_states(found, features, self.kv_cache, self.attention)
        self.ahead.index_copy_(0, t["slots"], hidden)

    def _next_tokens(self, t: Mapping[str, Tensor], slots: Slots) -> Tensor:
        """The token behind each token of the batch, [num_tokens] int64; it may have been sampled just now. Where there
        is none (the end of a text that is only scored), any token of the vocabulary."""
        found = slots.tokens[t["token_slots"], t["positions"] + 1].long()
        return found.clamp(0, self.model.config.vocab_size - 1)


def lay_out_drafts(rows: Sequence[StepRow], slots: Slots) -> list[HostBatch]:
    """A batch for each draft token, of those rows of a step that get one. Rows begin at what is computed in their
    slots. Draft token n comes from position start - 1 + n, which for draft token 0 is computed already."""
    passes: list[HostBatch] = []
    for nth in range(max((row.num_drafts for row in rows), default=0)):
        single = [StepRow(row.slot, row.start + nth - 1, 1, True) for row in rows if row.num_drafts > nth]
        if passes and len(single) == len(passes[-1].slots):
            passes.append(one_further(passes[-1]))
            continue
        passes.append(lay_out_ahead(single, [nth - 1] * len(single), slots))
    return passes
