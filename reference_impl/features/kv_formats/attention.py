"""Torch attention over a cache of 8 or 4 bits: a value is the stored number times the scale of its slot and head, and
with 4 bits plus the head's lowest number.

This extends `TorchAttention.forward`: keys and values are multiplied by their scales as they are gathered. A row whose
blocks are contiguous is gathered, too, since a view of its codes is not enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.core.attention import Plan, TorchAttention
from reference_impl.interfaces import Batch, KVCache, scales_of
from reference_impl.kernels import reference


class ScaledTorchAttention(TorchAttention):
    """`TorchAttention` for a cache with scales; a cache without is read like in `TorchAttention`."""

    reads_scales = reads_four_bits = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        key_scale, value_scale = scales_of(kv_cache, layer)
        if key_scale is None or value_scale is None:
            return super().forward(q, k, v, layer, kv_cache, batch)
        kv_cache.write(layer, k, v, batch)
        keys, values = kv_cache.layer(layer)
        stored = ((keys, key_scale), (values, value_scale))
        plan: Plan = batch.attention_plan[batch.group_of_layer[layer]]
        out = torch.empty_like(q)
        for like in plan.short:
            key, value = self.workspace_for(like.slots, k)
            for (cache, scale), gathered in zip(stored, (key, value), strict=True):
                reference.stored(cache, like.slots.flatten(), scale, gathered.flatten(0, 1))
            rows = q[like.tokens].unflatten(0, (len(like.slots), -1))
            found = reference.attention_rows(rows, key, value, like.mask, self.scale, self.softcap)
            out[like.tokens] = found.flatten(0, 1)
        for tokens, slots in plan.others:
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop, device=keys.device)
            key, value = (
                reference.stored(cache, slots, scale, k.new_empty(len(slots), *k.shape[1:])) for cache, scale in stored
            )
            out[tokens] = reference.attention_one_row(q[tokens], key, value, self.scale, plan.window, self.softcap)
        return out
