"""Drafts of a row in a chain: each stands behind the one before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.staging import to_device
from reference_impl.core.worker import NO_TOKEN, StepRun
from reference_impl.features.speculative.candidates import typical
from reference_impl.features.speculative.drafts import Verified, draft_arrays, verify
from reference_impl.features.speculative.rejection import filtered, is_exact, rejection_arrays, verified

Ints = NDArray[np.int64]


class Chain:
    """How drafts in a chain are laid out, chosen and verified. part: the step's `DraftPart`."""

    def lay_out(self, run: StepRun, part: Any) -> None:
        """Adds the arrays by which drafts are looked up to the batch's."""
        batch, w = run.batch, run.worker
        if batch.drafts:
            batch.arrays.update(draft_arrays(batch, run.step))
            if is_exact(w.sampler) and not part.is_typical:
                batch.arrays.update(rejection_arrays(batch, w.slots.host, run.step.step_id))
        part.source.lay_out(run, part.rows)

    def parents(self, run: StepRun) -> Sequence[Sequence[int]]:
        """The parents of the drafts of each row that has any: see `Drafted`."""
        return [tuple(range(-1, num - 1)) for num in run.batch.drafts if num]

    def own_logits(self, run: StepRun) -> Ints:
        """Which of the logits stand behind each draft, [D]."""
        return run.batch.arrays["draft.at"] + 1

    def before(self, run: StepRun, rows: Ints) -> tuple[Tensor, Tensor] | None:
        """The drafts before the positions of some logits, rows [P]: (which of the P, token); None: there are none."""
        first = np.searchsorted(run.batch.sampling, np.array(run.batch.sampling)[rows])  # logits of the same row
        before = rows - first
        if not before.any():
            return None
        which = np.repeat(np.arange(len(rows)), before)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(before) - before, before)
        t = to_device({"which": which, "first": first[which], "nth": nth}, run.worker.model.device)
        slot, position = run.tensors["sampling_slots"][t["first"]], run.tensors["sample_positions"][t["first"]]
        tokens = run.worker.slots.tokens[slot, position + t["nth"]]  # drafts lie behind what is known
        return t["which"], tokens.long()

    def chosen(self, run: StepRun, part: Any, tokens: Tensor) -> Tensor:
        """The tokens [logits], with those that are drawn by rejection or kept as typical in place of the sampler's."""
        t = run.tensors
        if part.is_typical and "temperature" in t:  # otherwise all rows are greedy
            drafts, at = t["draft.tokens"], t["draft.at"]
            kept = typical(filtered(run.scores, t, at), drafts)
            return tokens.index_copy(0, at, torch.where(kept, drafts, tokens[at]))
        if "draft.unseeded" not in t:
            return tokens
        at = t["draft.at"][t["draft.unseeded"]]
        p, drafts = filtered(run.scores, t, at), t["draft.tokens"][t["draft.unseeded"]]
        return tokens.index_copy(0, at, verified(p, part.q, drafts, t["draft.verdicts"]))

    def verify(self, run: StepRun, part: Any, tokens: Tensor, cut: Tensor | None) -> Verified:
        """How many drafts are kept. tokens [logits]: what was chosen there. cut [D] bool: drafts that are not kept,
        whatever was chosen."""
        t: Mapping[str, Tensor] = run.tensors
        if cut is not None:
            t = {**t, "draft.tokens": t["draft.tokens"].masked_fill(cut, NO_TOKEN)}
        return verify(tokens, t, max(run.batch.drafts))
