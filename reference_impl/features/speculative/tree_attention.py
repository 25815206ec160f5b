"""Torch attention of draft trees: a node sees the context, its row's known tokens, its ancestors and itself.

This extends `TorchAttention.plan` and `forward`, only in steps with trees: there each row is computed by itself, with a
mask where it is a tree (`reference.tree_mask`).
"""

from __future__ import annotations

from torch import Tensor

from reference_impl.features.kv_formats.attention import ScaledTorchAttention
from reference_impl.interfaces import Batch, KVCache, scales_of
from reference_impl.kernels import reference


class TreeTorchAttention(ScaledTorchAttention):
    """`ScaledTorchAttention` that also takes draft trees."""

    takes_trees = True

    def plan(self, batch: Batch) -> None:
        if batch.ancestors is None:
            super().plan(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        if batch.ancestors is None:
            return super().forward(q, k, v, layer, kv_cache, batch)
        kv_cache.write(layer, k, v, batch)
        key_scale, value_scale = scales_of(kv_cache, layer)
        group = batch.groups[batch.group_of_layer[layer]]
        return reference.flash_attention(
            q, *kv_cache.layer(layer), group.block_table, batch.query_start_loc, batch.seq_lens, self.scale,
            window=group.window, softcap=self.softcap, key_scale=key_scale, value_scale=value_scale,
            ancestors=batch.ancestors,
        )  # fmt: skip
