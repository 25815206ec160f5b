"""Attention over the paged cache in plain torch: the backend that runs everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, GroupTables, KVCache, has_scales
from reference_impl.kernels import reference

MOST_SLOTS = 2**16  # gathered at a time; more only for a single row that sees more


@dataclass
class LikeRows:
    """Rows of one token that see about equally much, padded to the one that sees most."""

    rows: slice
    slots: Tensor  # [rows, longest]
    mask: Tensor  # [rows, 1, 1, longest], 0 or -inf


@dataclass
class Plan:
    """What each row sees of one KV group; the same for all its layers, so it is worked out once a step."""

    window: int | None
    decode: list[LikeRows]
    others: list[tuple[slice, Tensor | slice]]  # a row's tokens in the batch, and the slots that any of them sees


class TorchAttention:
    """Rows of one token are computed together with those that see about as much, the others one by one.

    softcap: scores s become softcap x tanh(s / softcap) before the softmax.
    """

    reads_scales = True  # of a cache of 8 bits

    def __init__(self, scale: float, dtype: torch.dtype, softcap: float | None = None):
        self.scale, self.dtype, self.softcap = scale, dtype, softcap
        self.ran = {"sdpa" if softcap is None else "unfused"}  # torch's fused attention knows no soft cap
        self._workspace: Tensor | None = None

    def plan(self, batch: Batch) -> None:
        batch.attention_plan = [self._plan(batch, group) for group in batch.groups]

    def _plan(self, batch: Batch, group: GroupTables) -> Plan:
        # A single decoding row needs no padding, so it is treated like any other row.
        num_grouped = batch.num_decode_rows if batch.num_decode_rows > 1 else 0
        window = group.window
        seen = [n if window is None else min(n, window) for n in batch.context_lens[:num_grouped]]
        decode = [self._like_rows(batch, group, rows, seen[rows.start]) for rows in like_lengths(seen)]
        others, first = [], num_grouped  # a grouped row has one token
        for row in range(num_grouped, batch.num_rows):
            end = first + batch.query_lens[row]
            others.append((slice(first, end), _row_slots(batch, group, row)))
            first = end
        return Plan(window, decode, others)

    def _like_rows(self, batch: Batch, group: GroupTables, rows: slice, longest: int) -> LikeRows:
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
        return LikeRows(rows, slots, mask[:, None, None])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        kv_cache.write(layer, k, v, batch)
        (keys, values), scales = kv_cache.layer(layer), scales_of(kv_cache, layer)
        plan: Plan = batch.attention_plan[batch.group_of_layer[layer]]
        out = torch.empty_like(q)
        for g in plan.decode:
            room = self._room(g.slots.numel(), k)
            out[g.rows] = reference.attention_decode_rows(
                q[g.rows], keys, values, g.slots, g.mask, self.scale, room, self.softcap, *scales
            )
        for tokens, slots in plan.others:
            key, value = (_at(cache, slots, s, k) for cache, s in zip((keys, values), scales, strict=True))
            out[tokens] = reference.attention_one_row(q[tokens], key, value, self.scale, plan.window, self.softcap)
        return out

    def _room(self, num_slots: int, key: Tensor) -> Tensor:
        """[2, at least num_slots, num_kv_heads, head_dim], the same memory in every layer and step.

        Fresh memory of some megabytes costs a page fault per 4 KiB, which took three times as long as the attention.
        It doubles when it grows: contexts get longer by a token a step.
        """
        if self._workspace is None or self._workspace.shape[1] < num_slots:
            self._workspace = key.new_empty(2, max(num_slots, min(2 * num_slots, MOST_SLOTS)), *key.shape[1:])
        return self._workspace


def like_lengths(lengths: Sequence[int]) -> list[slice]:
    """Cuts rows, longest context first, so that padding at most doubles what is read, and MOST_SLOTS bound it."""
    groups: list[slice] = []
    for row, length in enumerate(lengths):
        first = groups[-1].start if groups else 0
        if groups and 2 * length >= lengths[first] and (row + 1 - first) * lengths[first] <= MOST_SLOTS:
            groups[-1] = slice(first, row + 1)
        else:
            groups.append(slice(row, row + 1))
    return groups


def scales_of(kv_cache: KVCache, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """(of keys, of values); None where there are none."""
    return kv_cache.scales(layer) if has_scales(kv_cache) else (None, None)


def _at(cache: Tensor, slots: Tensor | slice, scale: Tensor | None, like: Tensor) -> Tensor:
    """What lies there, [slots, num_kv_heads, head_dim]: of a cache of 8 bits, in the dtype of `like`."""
    if isinstance(slots, slice):
        if scale is None:
            return cache.flatten(0, 1)[slots]
        slots = torch.arange(slots.start, slots.stop, device=cache.device)
    out = cache if scale is None else like
    return reference.stored(cache, slots, scale, out.new_empty(len(slots), *cache.shape[2:]))


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
