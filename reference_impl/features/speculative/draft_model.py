"""A draft model: a smaller one that drafts what the target would write (Leviathan et al. 2023).

Its keys and values lie in a cache of its own with the target's blocks: the same number, size and ids. So the target's
block tables address both caches, and what the engine does with blocks (prefix caching, copies, forks, swapping,
roll-back) it does for the draft, too.

    pass 0       all rows of the step: those without drafts are only computed, so that the draft keeps up;
                 behind the others the first draft token is drawn
    pass 1 ...   of rows that get another draft token, the one before: one token each

For a slot with n tokens computed, keys and values of positions [0, n - 1) are right in the draft's cache: if all drafts
were kept, the last was drawn, but not computed. So in pass 0 each row begins one token before its own.
(Where that draft token is the last token of a block, and another request finds the block in the prefix cache before
this one has gone on, the position stays wrong for the other one, whose drafts are worse then.)

A draft token for a request with a seed is drawn like the target's token will be, with the position's own random number:
where the two distributions are similar, the tokens are mostly the same. For a request without a seed it is drawn with a
number of its own, and its distribution is kept for `rejection.py`. For a request with penalties or biases the draft's
logits are changed like the target's (`draft_scores.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch, as_batch, lay_out
from reference_impl.core.decoder import Decoder
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.slots import Slots
from reference_impl.core.staging import Arrays
from reference_impl.features.speculative.draft_scores import DraftScores
from reference_impl.features.speculative.rejection import DRAFT, filtered
from reference_impl.interfaces import AttentionBackend, KVCache, KVSpec, StepRow

# (batch of a pass) -> its logits [rows, vocab_size], of the sampler's dtype, and its hidden states [rows, hidden_size];
# None: it cannot be replayed.
Replay = Callable[[HostBatch], tuple[Tensor, Tensor] | None]
# (batch of a pass over inner nodes of trees, their tokens, what the head is given of their parents, what they see) ->
# logits and hidden states of each node, likewise.
ReplayNodes = Callable[[HostBatch, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]
PREFIX = "draft.pass."  # before the names of a pass's arrays; what begins with "draft." stands beside a graph


@dataclass(frozen=True)
class DraftModel:
    """A draft model at work. model: has the target's vocabulary and device. kv_cache, kv_specs: with the target's
    number of blocks and block size. attention: its own, since heads and scale differ. logits_dtype: the target's, which
    the sampler expects."""

    model: Decoder
    kv_cache: KVCache
    attention: AttentionBackend
    kv_specs: Sequence[KVSpec]
    logits_dtype: torch.dtype
    distance = 0  # from the token behind a pass's position to the one that the pass drafts

    @property
    def own_cache(self) -> KVCache | None:
        """The draft model's own cache; None if it uses the target's."""
        return self.kv_cache

    def lay_out(self, rows: Sequence[StepRow], slots: Slots) -> list[HostBatch]:
        """The passes over a step's rows, which begin at what is computed in their slots."""
        return lay_out_passes(rows, slots)

    def propose(
        self, passes: Sequence[HostBatch], t: Mapping[str, Tensor], slots: Slots, sampler: TorchSampler,
        scores: DraftScores, replay: Replay | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Runs the passes and writes the drafts behind the tokens of their slots. t: with the `arrays_of` all passes,
        on the device. Returns q for `rejection.verified`, [E, vocab_size]; None if no drafts need it. replay: computes
        passes by CUDA graphs, where it can."""
        q = None
        for number, (batch, mine) in enumerate(zip(passes, by_pass(t, len(passes)), strict=True)):
            found = None if replay is None else replay(batch)
            if found is not None:
                logits, _ = found
                ends = slots.computed.index_select(0, mine["slots"]) + mine["query_lens"]
                mine["sample_positions"] = ends
            else:
                hidden = self.run(batch, mine, slots)
                if not batch.sampling:
                    continue
                logits = self.model.logits(hidden).to(self.logits_dtype)
            moved = scores(logits, slots_of(batch), mine["sample_positions"], number)
            slots.put(mine, sampler.choose(moved, mine))
            q = with_drawn(q, moved, mine, t)
        return q

    def run(self, batch: HostBatch, t: dict[str, Tensor], slots: Slots) -> Tensor:
        """The hidden states [logits, hidden_size] of a pass. t: its arrays; what was looked up is added to them."""
        t |= slots.look_up(t, max(batch.context_lens))
        found: Tensor = self.model.hidden_states(as_batch(batch, t, self.kv_specs), self.kv_cache, self.attention)
        return found


def slots_of(batch: HostBatch) -> list[int]:
    """The slot of each of the batch's logits."""
    return [batch.slots[row] for row in batch.sampling]


def lay_out_passes(rows: Sequence[StepRow], slots: Slots, back: int = 1) -> list[HostBatch]:
    """The passes of `DraftModel.lay_out`. back: how many tokens before its own each row begins in pass 0."""
    if not rows:
        return []
    before = [min(row.start, back) for row in rows]
    first = [
        StepRow(row.slot, row.start - b, row.num_tokens + b, row.num_drafts > 0)
        for row, b in zip(rows, before, strict=True)
    ]
    passes = [lay_out_ahead(first, [-b for b in before], slots)]
    for nth in range(1, max(row.num_drafts for row in rows)):
        drafted = [(row, row.num_tokens + nth - 1) for row in rows if row.num_drafts > nth]
        if nth > 1 and len(drafted) == len(passes[-1].slots):
            passes.append(one_further(passes[-1]))
            continue
        single = [StepRow(row.slot, row.start + ahead, 1, True) for row, ahead in drafted]
        passes.append(lay_out_ahead(single, [ahead for _, ahead in drafted], slots))
    return passes


def one_further(batch: HostBatch) -> HostBatch:
    """The same rows, of one token each, one position later: takes a quarter of the time of laying them out."""
    shifted = {name: batch.arrays[name] + 1 for name in ("query_lens", "offset")}
    return HostBatch(
        batch.arrays | shifted, batch.slots, batch.request_ids, batch.query_lens,
        tuple([length + 1 for length in batch.context_lens]), batch.order, batch.sampling, batch.lengths + 1,
        batch.settings,
    )  # fmt: skip


def lay_out_ahead(rows: Sequence[StepRow], ahead: Sequence[int], slots: Slots) -> HostBatch:
    """`lay_out` for rows that begin `ahead` tokens behind what is computed in their slots, or before it if negative."""
    batch = lay_out(rows, slots)
    shift = np.array([ahead[at] for at in batch.order])
    arrays: Arrays = {
        "query_lens": batch.arrays["query_lens"] + shift,  # `look_up` counts a row's end from what is computed
        "offset": batch.arrays["offset"] + np.repeat(shift, batch.query_lens),
    }
    if "sampling_lens" in batch.arrays:
        arrays["sampling_lens"] = batch.arrays["sampling_lens"] + shift[list(batch.sampling)]
    return replace(batch, arrays=batch.arrays | arrays)


def arrays_of(passes: Sequence[HostBatch], distance: int, sampler: TorchSampler, places: Mapping[int, int]) -> Arrays:
    """The arrays by which `propose` looks up and draws. distance: see `DraftModel`. places: see `rejection.places`."""
    found: Arrays = {}
    next_places = dict(places)
    for number, batch in enumerate(passes):
        arrays = batch.arrays | (drawn_by(batch, distance, sampler, next_places) if batch.sampling else {})
        found |= {f"{PREFIX}{number}.{name}": array for name, array in arrays.items()}
    return found


def drawn_by(batch: HostBatch, distance: int, sampler: TorchSampler, next_places: dict[int, int]) -> Arrays:
    """The arrays by which a draft token at each of the batch's logits is drawn. distance: see `DraftModel`.
    next_places: like `rejection.places`, but for each slot's next draft token; it is advanced. With places the arrays
    have also unseeded, place [drafts]: which of the logits, which of the E.
    """
    slots, settings = slots_of(batch), batch.settings
    found: Arrays = {}
    if unseeded := [at for at, slot in enumerate(slots) if slot in next_places]:
        settings = settings.copy()
        settings["sample_index"][unseeded] += DRAFT
        place = []
        for at in unseeded:
            place.append(next_places[slots[at]])
            next_places[slots[at]] += 1
        found = {"unseeded": np.array(unseeded), "place": np.array(place)}
    return found | sampler.columns(settings, batch.lengths + distance)


def by_pass(t: Mapping[str, Tensor], num_passes: int) -> list[dict[str, Tensor]]:
    """The arrays of each pass, under their own names."""
    found: list[dict[str, Tensor]] = [{} for _ in range(num_passes)]
    for name, tensor in t.items():
        if name.startswith(PREFIX):
            number, _, own = name.removeprefix(PREFIX).partition(".")
            found[int(number)][own] = tensor
    return found


def with_drawn(
    q: Tensor | None, scores: Tensor, t: Mapping[str, Tensor], all_arrays: Mapping[str, Tensor]
) -> Tensor | None:
    """q [E, vocab_size] with the distributions that a pass's drafts were drawn from; None while there are none. t: the
    pass's arrays."""
    if "unseeded" not in t:
        return q
    probs = filtered(scores, t, t["unseeded"])
    q = probs.new_empty(len(all_arrays["draft.unseeded"]), probs.shape[1]) if q is None else q
    return q.index_copy_(0, t["place"], probs)
