"""Attention over the paged cache in plain torch: the backend that runs everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, KVCache
from reference_impl.kernels import reference


@dataclass
class _Plan:
    """Where each row's context lies; the same for all layers, so it is worked out once a step."""

    decode_slots: Tensor | None  # [num_decode_rows, max_seq_len]
    decode_mask: Tensor | None  # [num_decode_rows, 1, 1, max_seq_len], 0 or -inf
    row_slots: dict[int, Tensor | slice]  # row -> [seq_len]
    first_query: list[int]  # row -> index of its first token in the batch


class TorchAttention:
    """Rows of one token are computed together, the others one by one."""

    def __init__(self, scale: float, dtype: torch.dtype):
        self.scale, self.dtype = scale, dtype

    def plan(self, batch: Batch) -> None:
        block_size, decode = batch.block_size, batch.num_decode_rows
        if decode == 1:  # one sequence: no padding needed, treat it like any other row
            decode = 0
        slots, mask = None, None
        if decode:
            longest = max(batch.context_lens[:decode])
            position = torch.arange(longest, device=batch.block_table.device)
            blocks = batch.block_table[:decode].long().index_select(1, position // block_size)
            slots = blocks * block_size + position % block_size
            padding = position >= batch.seq_lens[:decode, None]
            slots = torch.where(padding, slots[:, :1], slots)
            mask = torch.zeros(padding.shape, dtype=self.dtype, device=padding.device).masked_fill_(padding, -torch.inf)
            mask = mask[:, None, None]
        rows = {r: _row_slots(batch, r) for r in range(decode, batch.num_rows)}
        first = [0]
        for n in batch.query_lens:
            first.append(first[-1] + n)
        batch.attention_plan = _Plan(slots, mask, rows, first)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        kv_cache: KVCache,
        batch: Batch,
    ) -> Tensor:
        kv_cache.write(layer, k, v, batch)
        keys, values = (t.flatten(0, 1) for t in kv_cache.layer(layer))
        plan: _Plan = batch.attention_plan
        out = torch.empty_like(q)
        if plan.decode_slots is not None and plan.decode_mask is not None:
            n = plan.decode_slots.shape[0]
            out[:n] = reference.attention_decode_rows(
                q[:n], keys, values, plan.decode_slots, plan.decode_mask, self.scale
            )
        for row, slots in plan.row_slots.items():
            a, b = plan.first_query[row], plan.first_query[row + 1]
            out[a:b] = reference.attention_one_row(q[a:b], _at(keys, slots), _at(values, slots), self.scale)
        return out


def _at(cache: Tensor, slots: Tensor | slice) -> Tensor:
    return cache[slots] if isinstance(slots, slice) else cache.index_select(0, slots)


def _row_slots(batch: Batch, row: int) -> Tensor | slice:
    """The row's slots; a slice (a view instead of a copy) where its blocks happen to lie side by side."""
    seq_len = batch.context_lens[row]
    num_blocks = -(-seq_len // batch.block_size)
    blocks = batch.block_table[row, :num_blocks].tolist()
    if blocks == list(range(blocks[0], blocks[0] + num_blocks)):
        return slice(blocks[0] * batch.block_size, blocks[0] * batch.block_size + seq_len)
    return reference.context_slots(batch.block_table[row], seq_len, batch.block_size)
