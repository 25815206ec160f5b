"""Guesses that were made here, under a grammar: a row has a mask for its last known token, and behind each guess that
the grammar allows. From the first on that it does not, or behind which it has no mask, guesses are cut: a row ends with
what the position of the first one gets. That is verified as ever, and may be the guess itself: to draw it anew where a
guess is forbidden would be wrong, since a guess that is not leaves less of p to draw from (`rejection.py`).

Extends `MaskRun.num_masks` and `allow`.
"""

from __future__ import annotations

import numpy as np

from reference_impl.annexes.grammars.worker import MaskRun
from reference_impl.annexes.speculative.worker import DraftRun
from reference_impl.core.staging import to_device
from reference_impl.interfaces import Masks


class MaskedDraftRun(DraftRun, MaskRun):
    def num_masks(self, row: int, given: bytes) -> int:
        most, size = super().num_masks(row, given), -(-self.worker.model.config.vocab_size // 8)
        if self.step.rows[self.batch.order[row]].drafts or len(given) % size:  # the host's, cut there; or no masks
            return most
        return min(most, max(1, len(given) // size))

    def allow(self, masks: Masks) -> None:
        super().allow(masks)
        if not self.batch.drafts:
            return
        arrays, drafted = self.batch.arrays, [row for row, num in enumerate(self.batch.drafts) if num]
        given = [masks.rows[self.batch.order[row]] for row in drafted]
        kept = [
            self.batch.drafts[row] if mask is None else self.num_masks(row, mask) - 1
            for row, mask in zip(drafted, given, strict=True)
        ]
        cut = arrays["draft.nth"] >= np.array(kept)[arrays["draft.row"]]
        if cut.any():
            self.tensors |= to_device({"draft.cut": cut}, self.worker.slots.device)
