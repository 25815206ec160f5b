"""Early exit: the target's own first layers draft, through its last norm and lm_head (self-speculation: "LayerSkip",
Elhoushi et al. 2024; "Draft & Verify", Zhang et al. 2023, leave out layers elsewhere).

It needs no weights and no memory: keys and values of the first n layers are the target's, in the target's cache. A
drafting pass writes those of the tokens that it computes, and the step that verifies the drafts computes and writes
them again, with the same numbers up to rounding. So those of all earlier tokens are there, and nothing has to follow.

How often drafts are right depends on the model. LayerSkip's models were trained with layers left out, and with the loss
at every layer; without that, early layers say little about the next token. The course target is such a model: of drafts
behind 4 of its 8 layers, two in a row, 14 to 17 % are kept, behind 6 of them 47 to 50 % (bench/README.md), and each
costs these layers and an lm_head, more than half of a step. It does not pay there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from reference_impl.core.batch import HostBatch
from reference_impl.core.decoder import Decoder
from reference_impl.core.slots import Slots
from reference_impl.features.speculative.draft_model import DraftModel, lay_out_passes
from reference_impl.interfaces import StepRow


class EarlyExit(DraftModel):
    """A draft model made of the target's first layers. model: `first_layers` of the target. kv_cache, attention,
    kv_specs: the target's."""

    own_cache = None

    def lay_out(self, rows: Sequence[StepRow], slots: Slots) -> list[HostBatch]:
        """The passes, only over rows that get drafts, from their first token on: all before it is in the cache."""
        return lay_out_passes([row for row in rows if row.num_drafts], slots, back=0)


def first_layers(model: Decoder, num_layers: int) -> Decoder:
    """The model with its first num_layers layers only; weights are shared."""
    early = copy.copy(model)
    early._modules = {**model._modules, "layers": model.layers[:num_layers]}  # those of a copy are the model's own
    return early
