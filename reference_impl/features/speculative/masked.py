"""Guesses that were made here, under a grammar: a row has a mask for its last known token, and one behind each guess.
One that allows nothing says that its guess is cut: the grammar forbids it, or has no mask behind it. What is sampled
before it is then the row's last. That is verified as ever, and may be the guess itself: to draw it anew where a guess
is forbidden would be wrong, since a guess that is not leaves less of p to draw from (`rejection.py`).

Extends `MaskRun.is_cut` and `allow`.
"""

from __future__ import annotations

import numpy as np

from reference_impl.core.staging import to_device
from reference_impl.features.grammars.masks import allows_any
from reference_impl.features.grammars.worker import MaskRun
from reference_impl.features.speculative.worker import DraftRun
from reference_impl.interfaces import Masks


class MaskedDraftRun(DraftRun, MaskRun):
    def is_cut(self, row: int, mask: bytes, nth: int) -> bool:
        if nth == 0 or self.step.rows[self.batch.order[row]].drafts:  # the host's guesses were cut there
            return False
        return not allows_any(mask, self.worker.model.config.vocab_size)

    def allow(self, masks: Masks) -> None:
        super().allow(masks)
        if not self.batch.drafts:
            return
        assert self.allowed is not None
        given = [masks.rows[at] is not None for at in self.batch.order]
        bound = np.array([given[row] for row, num in enumerate(self.batch.drafts) if num])
        cut = bound[self.batch.arrays["draft.row"]] & ~np.isin(self.own_logits(), self.allowed.rows)
        if cut.any():
            self.tensors |= to_device({"draft.cut": cut}, self.worker.slots.device)
