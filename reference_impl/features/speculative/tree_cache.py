"""Moves keys and values of a kept path to where their positions belong."""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.interfaces import MovesScales


def move_tokens(cache: PagedKVCache, sources: Tensor, targets: Tensor) -> None:
    """Copies keys and values of tokens within the cache, in all layers of their KV group: codes and scales as they are.
    All sources are read before any target is written. sources, targets [tokens] int64, slots of the cache; no target
    twice."""
    data = cache.data.view(torch.uint8) if cache.data.element_size() == 1 else cache.data  # not of float8 everywhere
    slots = data.flatten(2, 3)  # [layers of a group, 2, num_slots, num_kv_heads, head_dim]
    slots.index_copy_(2, targets, slots.index_select(2, sources))
    if isinstance(cache, MovesScales):
        scales, size = cache.scale_of_slots, data.shape[3]
        found = scales[:, :, sources // size, sources % size]
        scales[:, :, targets // size, targets % size] = found
