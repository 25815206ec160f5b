"""The engine's KV cache: the core's or one of another format, with host memory where blocks are swapped out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reference_impl.features.kv_formats.formats import kv_format
from reference_impl.interfaces import KVSpec

if TYPE_CHECKING:
    import torch

    from reference_impl.core.kv_cache import PagedKVCache


def widths(kv_dtype: str, dtype: torch.dtype) -> dict[str, Any]:
    """The widths in bits of keys and values in the cache, and of their scales (one for each head of a slot) and zero
    points, as fields of `KVSpec`. dtype: the model's."""
    stored = kv_format(kv_dtype)
    if stored is None:
        return {"bits_per_value": 8 * dtype.itemsize}
    names = ("bits_per_value", "bits_per_scale", "bits_per_zero_point")
    return {name: getattr(stored, name) for name in names}


def kv_cache(
    specs: Sequence[KVSpec],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    num_host_blocks: int = 0,
    kv_dtype: str = "auto",
) -> PagedKVCache:
    """The KV cache. dtype: the model's, in which keys and values are stored unless kv_dtype names a format.
    num_host_blocks: room in host memory for blocks that are swapped out."""
    import torch

    from reference_impl.core.kv_cache import PagedKVCache

    stored = kv_format(kv_dtype)
    store = PagedKVCache if stored is None else stored.cache()
    cache = store(specs, num_blocks, dtype if stored is None else getattr(torch, stored.dtype), device)
    if num_host_blocks:
        from reference_impl.features.swap.cache import HostBlocks

        cache.host = HostBlocks(cache.blocks, num_host_blocks)
    return cache
