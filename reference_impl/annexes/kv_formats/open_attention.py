"""Torch attention over a `ByChannelKVCache`: a query reads its own block as it is, and earlier ones rounded.

Extends `TorchAttention.plan` and `forward`: what a row sees are two lists of keys side by side, those of its full
blocks and those of its extended row, with a mask that shows each query one of the two for every position. Steps with
trees of guesses are computed row by row instead, by the kernels' twins (`reference.flash_by_channel`): there a guess
reads blocks that its own path fills, and each path rounds them anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from reference_impl.annexes.kv_formats.open_blocks import Extended, extended
from reference_impl.core.attention import TorchAttention, by_length
from reference_impl.interfaces import Batch, GroupTables, KVCache
from reference_impl.kernels import reference

if TYPE_CHECKING:
    from reference_impl.annexes.kv_formats.by_channel import ByChannelKVCache


@dataclass
class Seen:
    """By rows of as many tokens that see about as much.

    keys [rows, rounded + exact]: of the first num_rounded columns slots of the cache, of the others places in the
    extended rows. padding [rows, num_rounded] bool: what is to be zero there, where a row has fewer; None: nowhere.
    mask [rows, 1, query_len, rounded + exact], 0 or -inf.
    """

    tokens: slice  # of the batch
    keys: Tensor
    num_rounded: int
    padding: Tensor | None
    mask: Tensor


class OpenBlockAttention(TorchAttention):
    """softcap: as of `TorchAttention`."""

    reads_open_blocks = takes_trees = True

    def plan(self, batch: Batch) -> None:
        if batch.ancestors is not None:
            return
        batch.attention_plan, rows = [], extended(batch)
        for group in batch.groups:
            far = batch.context_lens if group.window is None else [group.window + n for n in batch.query_lens]
            seen = [min(n, most) for n, most in zip(batch.context_lens, far, strict=True)]
            plan, first = [], 0
            for alike in by_length(batch.query_lens, seen):
                tokens = slice(first, first := first + sum(batch.query_lens[alike]))
                plan.append(self._seen(batch, group, rows, alike, tokens))
            batch.attention_plan.append(plan)

    def _seen(self, batch: Batch, group: GroupTables, rows: Extended, alike: slice, tokens: slice) -> Seen:
        size, device = batch.block_size, group.block_table.device
        columns = (rows.start, rows.end, rows.first, rows.place)
        start, end, first, place = (torch.from_numpy(x[alike]).to(device)[:, None] for x in columns)
        last = end - 1 - (end - 1) % size  # where the last query's block begins: up to here keys are read rounded
        since = torch.zeros_like(start) if group.window is None else (start - group.window + 1).clamp(min=0)
        num_rounded = int(np.maximum(0, _host(last - since)).max())
        rounded = since + torch.arange(num_rounded, device=device)
        exact = first + torch.arange(int(_host(end - first).max()), device=device)
        table, missing = group.block_table[alike].long(), rounded >= last
        blocks = table.gather(1, (rounded // size).clamp(max=table.shape[1] - 1))
        slots = torch.where(missing, 0, blocks * size + rounded % size)
        places = torch.where(exact < end, place + exact - first, place)

        query = (start + torch.arange(batch.query_lens[alike.start], device=device))[:, :, None]
        key = torch.cat((rounded, exact), 1)[:, None]
        own = key // size == query // size
        is_exact = torch.arange(key.shape[-1], device=device) >= num_rounded
        sees = (key <= query) & (own == is_exact)
        if group.window is not None:
            sees &= key > query - group.window
        mask = torch.zeros(sees.shape, dtype=self.dtype, device=device).masked_fill_(~sees, -torch.inf)
        padding = missing if len(start) > 1 and bool(_host(missing).any()) else None
        return Seen(tokens, torch.cat((slots, places), 1), num_rounded, padding, mask[:, None])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        cache = cast("ByChannelKVCache", kv_cache)
        if batch.ancestors is not None:
            return self._with_trees(q, k, v, layer, cache, batch)
        exact = cache.write_open(layer, k, v, batch)
        out = torch.empty_like(q)
        plan: list[Seen] = batch.attention_plan[batch.group_of_layer[layer]]
        for like in plan:
            slots, places = like.keys[:, : like.num_rounded], like.keys[:, like.num_rounded :]
            rounded = cache.read_rounded(layer, slots, k.dtype) if like.num_rounded else (None, None)
            both = self.workspace_for(like.keys, k)
            for gathered, far, near in zip(both, rounded, exact, strict=True):
                if far is not None:  # zeros: what was never written may be NaN
                    gathered[:, : like.num_rounded] = far
                    if like.padding is not None:
                        gathered[:, : like.num_rounded].masked_fill_(like.padding[..., None, None], 0)
                gathered[:, like.num_rounded :] = near[places]
            rows = q[like.tokens].unflatten(0, (len(like.keys), -1))
            found = reference.attention_rows(rows, *both, like.mask, self.scale, self.softcap)
            out[like.tokens] = found.flatten(0, 1)
        return out

    def _with_trees(self, q: Tensor, k: Tensor, v: Tensor, layer: int, cache: ByChannelKVCache, batch: Batch) -> Tensor:
        stored, seats, group = cache.by_channel(layer), cache.seats(batch), batch.groups[batch.group_of_layer[layer]]
        written = (k, v, stored, seats, group.slot_mapping, batch.query_start_loc, batch.seq_lens)
        reference.write_by_channel(*written, keeps=False)
        out = reference.flash_by_channel(
            q, k, v, stored, seats, group.block_table, batch.query_start_loc, batch.seq_lens, self.scale,
            window=group.window, softcap=self.softcap, ancestors=batch.ancestors,
        )  # fmt: skip
        reference.write_by_channel(*written, rounds=False)
        return out


def _host(x: Tensor) -> np.ndarray[Any, Any]:
    return x.cpu().numpy()
