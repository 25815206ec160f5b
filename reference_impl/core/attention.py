"""Attention over the paged cache (Kwon et al. 2023) in plain torch: the backend that runs everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, GroupTables, KVCache
from reference_impl.kernels import reference

MOST_SLOTS = 2**16  # gathered at a time; more only for a single row that sees more


@dataclass
class LengthBucket:
    """Rows of one token that see about equally much, padded to the one that sees most."""

    rows: slice
    slots: Tensor  # [rows, longest]; the padding repeats a slot of the same row: one never written may hold NaN
    mask: Tensor  # [rows, 1, 1, longest], 0 or -inf


@dataclass
class Plan:
    """What each row sees of one KV group; the same for all its layers, so it is worked out once a step."""

    window: int | None
    decode: list[LengthBucket]
    others: list[tuple[slice, Tensor | slice]]  # a row's tokens in the batch, and the slots that any of them sees


class TorchAttention:
    """Rows of one token are computed together with those that see about as much, the others one by one.

    softcap: scores s become softcap x tanh(s / softcap) before the softmax.
    """

    def __init__(self, scale: float, dtype: torch.dtype, softcap: float | None = None):
        self.scale, self.dtype, self.softcap = scale, dtype, softcap
        self.ran = {"sdpa" if softcap is None else "unfused"}  # torch's fused attention knows no soft cap
        self._workspace: Tensor | None = None

    def plan(self, batch: Batch) -> None:
        # A single decoding row needs no padding, so it is treated like any other row.
        num_grouped = batch.num_decode_rows if batch.num_decode_rows > 1 else 0
        batch.attention_plan = []
        for group in batch.groups:
            seen = [n if group.window is None else min(n, group.window) for n in batch.context_lens[:num_grouped]]
            decode = [self._bucket(batch, group, rows, seen[rows.start]) for rows in by_length(seen)]
            others, first = [], num_grouped  # a grouped row has one token
            for row in range(num_grouped, len(batch.query_lens)):
                end = first + batch.query_lens[row]
                others.append((slice(first, end), _row_slots(batch, group, row)))
                first = end
            batch.attention_plan.append(Plan(group.window, decode, others))

    def _bucket(self, batch: Batch, group: GroupTables, rows: slice, longest: int) -> LengthBucket:
        seq_lens, table = batch.seq_lens[rows, None], group.block_table[rows].long()
        position = torch.arange(longest, device=table.device)
        if group.window is None:
            blocks = table.index_select(1, position // batch.block_size)
        else:  # each row's positions begin where its window does
            position = position + (seq_lens - group.window).clamp(min=0)
            blocks = table.gather(1, position // batch.block_size)
        slots = blocks * batch.block_size + position % batch.block_size
        padding = position >= seq_lens
        slots = torch.where(padding, slots[:, :1], slots)
        mask = torch.zeros(padding.shape, dtype=self.dtype, device=padding.device).masked_fill_(padding, -torch.inf)
        return LengthBucket(rows, slots, mask[:, None, None])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        kv_cache.write(layer, k, v, batch)
        keys, values = kv_cache.layer(layer)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # [num_slots, num_kv_heads, head_dim]
        plan: Plan = batch.attention_plan[batch.group_of_layer[layer]]
        out = torch.empty_like(q)
        for b in plan.decode:
            key, value = self.workspace_for(b.slots, k)
            for cache, gathered in ((keys, key), (values, value)):
                torch.index_select(cache, 0, b.slots.flatten(), out=gathered.flatten(0, 1))
            out[b.rows] = reference.attention_decode_rows(q[b.rows], key, value, b.mask, self.scale, self.softcap)
        for tokens, slots in plan.others:
            key, value = keys[slots], values[slots]
            out[tokens] = reference.attention_one_row(q[tokens], key, value, self.scale, plan.window, self.softcap)
        return out

    def workspace_for(self, slots: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """For the keys and values there, each [*slots.shape, num_kv_heads, head_dim]: the same memory in all steps.

        Fresh memory of some megabytes costs a page fault per 4 KiB, which took three times as long as the attention.
        It doubles when it grows: contexts get longer by a token a step.
        """
        needed = slots.numel()
        if self._workspace is None or self._workspace.shape[1] < needed:
            self._workspace = like.new_empty(2, max(needed, min(2 * needed, MOST_SLOTS)), *like.shape[1:])
        key, value = self._workspace[:, :needed].unflatten(1, slots.shape)
        return key, value


def by_length(lengths: Sequence[int]) -> list[slice]:
    """Cuts rows, longest context first, so that padding at most doubles what is read, and MOST_SLOTS bound it."""
    groups: list[slice] = []
    for row, length in enumerate(lengths):
        first = groups[-1].start if groups else 0
        if groups and 2 * length >= lengths[first] and (row + 1 - first) * lengths[first] <= MOST_SLOTS:
            groups[-1] = slice(first, row + 1)
        else:
            groups.append(slice(row, row + 1))
    return groups


def _row_slots(batch: Batch, group: GroupTables, row: int) -> Tensor | slice:
    """Slots of the positions that any of the row's queries sees.

    A slice (a view instead of a copy) where its blocks happen to lie side by side.
    """
    size, end = batch.block_size, batch.context_lens[row]
    # The first query stands at end - query_len and sees window - 1 positions before its own.
    start = 0 if group.window is None else max(0, end - batch.query_lens[row] - group.window + 1)
    # Blocks that end before the window may be another request's by now: they are not read.
    table = group.block_table[row, start // size : -(-end // size)]
    first, last, blocks = start % size, end - start // size * size, table.tolist()
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        return slice(blocks[0] * size + first, blocks[0] * size + last)
    return reference.context_slots(table, last, size)[first:]
