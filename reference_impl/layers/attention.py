"""Attention over the paged cache in plain torch: the backend that runs everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, KVCache
from reference_impl.kernels import reference


@dataclass
class DecodeGroup:
    """Rows of one token whose contexts are of like length, padded to the longest of them."""

    rows: slice
    slots: Tensor  # [rows, max_seq_len]
    mask: Tensor  # [rows, 1, 1, max_seq_len], 0 or -inf


@dataclass
class Plan:
    """Where each row's context lies; the same for all layers, so it is worked out once a step."""

    decode: list[DecodeGroup]
    others: list[tuple[slice, Tensor | slice]]  # a row's tokens in the batch, and its slots [seq_len]


class TorchAttention:
    """Rows of one token are computed together in groups of like length, the others one by one."""

    def __init__(self, scale: float, dtype: torch.dtype):
        self.scale, self.dtype = scale, dtype
        self._workspace: Tensor | None = None

    def plan(self, batch: Batch) -> None:
        # A single decoding row needs no padding, so it is treated like any other row.
        num_grouped = batch.num_decode_rows if batch.num_decode_rows > 1 else 0
        groups = [self._group(batch, rows) for rows in like_lengths(batch.context_lens[:num_grouped])]
        others, first = [], num_grouped  # a grouped row has one token
        for row in range(num_grouped, batch.num_rows):
            end = first + batch.query_lens[row]
            others.append((slice(first, end), _row_slots(batch, row)))
            first = end
        batch.attention_plan = Plan(groups, others)

    def _group(self, batch: Batch, rows: slice) -> DecodeGroup:
        position = torch.arange(max(batch.context_lens[rows]), device=batch.block_table.device)
        blocks = batch.block_table[rows].long().index_select(1, position // batch.block_size)
        slots = blocks * batch.block_size + position % batch.block_size
        padding = position >= batch.seq_lens[rows, None]
        slots = torch.where(padding, slots[:, :1], slots)
        mask = torch.zeros(padding.shape, dtype=self.dtype, device=padding.device).masked_fill_(padding, -torch.inf)
        return DecodeGroup(rows, slots, mask[:, None, None])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        kv_cache.write(layer, k, v, batch)
        keys, values = (t.flatten(0, 1) for t in kv_cache.layer(layer))
        plan: Plan = batch.attention_plan
        out = torch.empty_like(q)
        for g in plan.decode:
            room = self._room(g.slots.numel(), keys)
            out[g.rows] = reference.attention_decode_rows(q[g.rows], keys, values, g.slots, g.mask, self.scale, room)
        for tokens, slots in plan.others:
            out[tokens] = reference.attention_one_row(q[tokens], _at(keys, slots), _at(values, slots), self.scale)
        return out

    def _room(self, num_slots: int, keys: Tensor) -> Tensor:
        """[2, at least num_slots, num_kv_heads, head_dim], the same memory in every layer and step.

        Fresh memory of some megabytes costs a page fault per 4 KiB, which took three times as long as the attention.
        It doubles when it grows: contexts get longer by a token a step.
        """
        if self._workspace is None or self._workspace.shape[1] < num_slots:
            self._workspace = keys.new_empty(2, 2 * num_slots, *keys.shape[1:])
        return self._workspace


def like_lengths(lengths: Sequence[int]) -> list[slice]:
    """Cuts rows, longest context first, so that padding at most doubles what a group reads."""
    groups: list[slice] = []
    for row, length in enumerate(lengths):
        if groups and 2 * length >= lengths[groups[-1].start]:
            groups[-1] = slice(groups[-1].start, row + 1)
        else:
            groups.append(slice(row, row + 1))
    return groups


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
