"""A model whose logits have the same bits whatever else is in the batch (He et al. 2025, batch invariance).

A product of 16 rows adds up its terms in another order than one of a single row, attention over a padded batch in
another than over one sequence, and so on: the results differ in their last bits, and once in a while by a token. Here
every token goes through the model alone, so there is one order, however prompts are cut and requests are batched,
preempted, or served from the prefix cache. In return nothing is shared: a step of n tokens reads the weights n times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import AttentionBackend, Batch, GroupTables, KVCache


class TokenByToken:
    """Stands for `model` in a worker and computes each token by itself; other attributes are the model's."""

    def __init__(self, model: Decoder):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        return self.logits(self.hidden_states(batch, kv_cache, attention))

    def hidden_states(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        """The hidden states of `Decoder.hidden_states`, each token computed by itself."""
        found = [self.model.hidden_states(one, kv_cache, attention) for one in single_tokens(batch)]
        return torch.cat(found)[batch.logits_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of `Decoder.logits`, each row computed by itself."""
        return torch.cat([self.model.logits(row) for row in hidden.split(1)])


def single_tokens(batch: Batch) -> list[Batch]:
    """A batch for each token, in order, so that a token's keys are in the cache before a later one reads them."""
    first, found = batch.input_ids.new_zeros(1), []
    start_loc = torch.arange(2, dtype=torch.int32, device=batch.input_ids.device)
    token = 0
    for row, length in enumerate(batch.query_lens):
        for at in range(length):
            this, context = slice(token, token + 1), batch.context_lens[row] - length + at + 1
            found.append(
                Batch(
                    input_ids=batch.input_ids[this], positions=batch.positions[this], query_start_loc=start_loc,
                    seq_lens=batch.positions[this].int() + 1, logits_indices=first,
                    request_ids=(batch.request_ids[row],), query_lens=(1,), context_lens=(context,), num_decode_rows=1,
                    block_size=batch.block_size, group_of_layer=batch.group_of_layer,
                    groups=tuple(
                        GroupTables(g.window, g.slot_mapping[this], g.block_table[row : row + 1]) for g in batch.groups
                    ),
                )
            )  # fmt: skip
            token += 1
    return found
