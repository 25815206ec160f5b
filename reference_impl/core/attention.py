"""Attention over the paged cache (Kwon et al. 2023) in plain torch: the backend that runs everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, GroupTables, KVCache
from reference_impl.kernels import reference

MOST_SLOTS = 2**16  # gathered at a time; more only for a single row that sees more
SHORT = 16  # tokens of a row that is computed together with others: one that decodes, with drafts or without


@dataclass
class LengthBucket:
    """Rows with the same number of tokens and contexts of similar length, padded to the longest."""

    tokens: slice  # of the batch
    slots: Tensor  # [rows, longest]; the padding repeats a slot of the same row: one never written may hold NaN
    mask: Tensor  # [rows, 1, query_len, longest], 0 or -inf


@dataclass
class Plan:
    """What each row sees of one KV group; the same for all its layers, so it is worked out once a step."""

    window: int | None
    short: list[LengthBucket]
    others: list[tuple[slice, Tensor | slice]]  # a row's tokens in the batch, and the slots that any of them sees


class TorchAttention:
    """Attention in torch. Short rows with the same number of tokens and contexts of similar length are computed
    together, all others one by one.

    softcap: scores s become softcap x tanh(s / softcap) before the softmax.
    """

    def __init__(self, scale: float, dtype: torch.dtype, softcap: float | None = None):
        self.scale, self.dtype, self.softcap = scale, dtype, softcap
        self.ran = {"sdpa" if softcap is None else "unfused"}  # torch's fused attention knows no soft cap
        self._workspace: Tensor | None = None

    def plan(self, batch: Batch) -> None:
        batch.attention_plan = []
        for group in batch.groups:
            plan, first, lens = Plan(group.window, [], []), 0, zip(batch.query_lens, batch.context_lens, strict=True)
            seen = [n if group.window is None else min(n, group.window + query_len - 1) for query_len, n in lens]
            for rows in by_length(batch.query_lens, seen):
                query_len, number, longest = batch.query_lens[rows.start], rows.stop - rows.start, seen[rows.start]
                tokens = slice(first, first := first + number * query_len)
                if number > 1:
                    plan.short.append(LengthBucket(tokens, *self._seen_by(batch, group, rows, query_len, longest)))
                else:  # it needs no padding
                    plan.others.append((tokens, _row_slots(batch, group, rows.start, longest)))
            batch.attention_plan.append(plan)

    def _seen_by(self, batch: Batch, group: GroupTables, rows: slice, query_len: int, longest: int) -> list[Tensor]:
        seq_lens, table = batch.seq_lens[rows, None], group.block_table[rows].long()
        position = torch.arange(longest, device=table.device)
        if group.window is None:
            blocks = table.index_select(1, position // batch.block_size)
        else:  # each row's positions begin where its first query's window does
            position = position + (seq_lens - group.window - query_len + 1).clamp(min=0)
            blocks = table.gather(1, position // batch.block_size)
        slots = blocks * batch.block_size + position % batch.block_size
        slots = torch.where(position >= seq_lens, slots[:, :1], slots)
        query = seq_lens[:, None] - torch.arange(query_len, 0, -1, device=table.device)[:, None]  # [rows, query_len, 1]
        key = position.view(-1, 1, position.shape[-1])
        unseen = key > query if group.window is None else (key > query) | (key <= query - group.window)
        mask = torch.zeros(unseen.shape, dtype=self.dtype, device=table.device).masked_fill_(unseen, -torch.inf)
        return [slots, mask[:, None]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        kv_cache.write(layer, k, v, batch)
        keys, values = kv_cache.layer(layer)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # [num_slots, num_kv_heads, head_dim]
        plan: Plan = batch.attention_plan[batch.group_of_layer[layer]]
        out = torch.empty_like(q)
        for b in plan.short:
            key, value = self.workspace_for(b.slots, k)
            for cache, gathered in ((keys, key), (values, value)):
                torch.index_select(cache, 0, b.slots.flatten(), out=gathered.flatten(0, 1))
            rows = q[b.tokens].unflatten(0, (len(b.slots), -1))
            found = reference.attention_rows(rows, key, value, b.mask, self.scale, self.softcap)
            out[b.tokens] = found.flatten(0, 1)
        for tokens, slots in plan.others:
            key, value = keys[slots], values[slots]
            out[tokens] = reference.attention_one_row(q[tokens], key, value, self.scale, plan.window, self.softcap)
        return out

    def workspace_for(self, slots: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the keys and values of these slots, each [*slots.shape, num_kv_heads, head_dim]. All steps share
        it, since page faults of fresh memory took three times as long as the attention. It doubles when it grows."""
        needed = slots.numel()
        if self._workspace is None or self._workspace.shape[1] < needed:
            self._workspace = like.new_empty(2, max(needed, min(2 * needed, MOST_SLOTS)), *like.shape[1:])
        key, value = self._workspace[:, :needed].unflatten(1, slots.shape)
        return key, value


def by_length(query_lens: Sequence[int], seen: Sequence[int]) -> list[slice]:
    """Slices of consecutive rows that are computed together: at most SHORT tokens in each row and the same number, and
    contexts so similar that padding at most doubles what is read, MOST_SLOTS in all. A row that fits none is alone."""
    groups: list[slice] = []
    for row, (query_len, length) in enumerate(zip(query_lens, seen, strict=True)):
        first = groups[-1].start if groups else 0
        alike = query_len == query_lens[first] <= SHORT and length <= seen[first] <= 2 * length
        if groups and alike and (row + 1 - first) * seen[first] <= MOST_SLOTS:
            groups[-1] = slice(first, row + 1)
        else:
            groups.append(slice(row, row + 1))
    return groups


def _row_slots(batch: Batch, group: GroupTables, row: int, num_seen: int) -> Tensor | slice:
    """The slots of the row's last num_seen positions; a slice, which needs no copy, where its blocks are contiguous."""
    size, end = batch.block_size, batch.context_lens[row]
    start = end - num_seen
    # Blocks that end before the window may be another request's by now: they are not read.
    table = group.block_table[row, start // size : -(-end // size)]
    first, last, blocks = start % size, end - start // size * size, table.tolist()
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        return slice(blocks[0] * size + first, blocks[0] * size + last)
    return reference.context_slots(table, last, size)[first:]
