"""The engine's KV cache: the core's or one of another format, with the annexes that the engine's options need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reference_impl.annexes.kv_formats.formats import kv_format
from reference_impl.annexes.kv_formats.spec import ByChannelSpec
from reference_impl.interfaces import KVSpec

if TYPE_CHECKING:
    import torch

    from reference_impl.core.kv_cache import PagedKVCache


def widths(kv_dtype: str, dtype: torch.dtype, block_size: int = 1, num_drafts: int = 0) -> dict[str, Any]:
    """Of keys and values in the cache, as fields of `spec_kind`. dtype: the model's. A scale is one for each head of a
    slot, but for keys by channel. num_drafts: guesses of a row, which open blocks must have room for."""
    stored = kv_format(kv_dtype)
    if stored is None:
        return {"bits_per_value": 8 * dtype.itemsize}
    names = ("bits_per_value", "bits_per_scale", "bits_per_zero_point")
    found = {name: getattr(stored, name) for name in names}
    if stored.keys_by_channel:
        open_blocks = 1 + -(-num_drafts // block_size)
        found |= {"open_bits_per_value": 8 * dtype.itemsize, "open_blocks": open_blocks}
    return found


def spec_kind(kv_dtype: str) -> type[KVSpec]:
    stored = kv_format(kv_dtype)
    return ByChannelSpec if stored is not None and stored.keys_by_channel else KVSpec


def of_drafts(kv_dtype: str) -> str:
    """The format of a draft model's own cache, beside one of kv_dtype."""
    stored = kv_format(kv_dtype)
    return kv_dtype if stored is None or stored.of_drafts is None else stored.of_drafts


def kv_cache(
    specs: Sequence[KVSpec],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    num_host_blocks: int = 0,
    kv_dtype: str = "auto",
    num_seqs: int = 1,
) -> PagedKVCache:
    """dtype: the model's, in which keys and values are stored unless kv_dtype names a format. num_host_blocks: room in
    host memory for blocks that are swapped out. num_seqs: requests that run, which may each have open blocks."""
    import torch

    from reference_impl.annexes.swap.cache import SwappedKVCache
    from reference_impl.annexes.transfer.cache import PageableKVCache
    from reference_impl.core.kv_cache import PagedKVCache

    stored = kv_format(kv_dtype)
    store = PagedKVCache if stored is None else stored.cache()
    options: dict[str, Any] = {"num_host_blocks": num_host_blocks} if num_host_blocks else {}
    line = ([SwappedKVCache] if num_host_blocks else []) + [PageableKVCache, store]
    # The annexes and the cache as one class, in which each method's super() is that of the next in the line.
    combined: Any = type(store.__name__, tuple(line), {})
    opens = (dtype, num_seqs) if stored is not None and stored.keys_by_channel else ()
    codes = dtype if stored is None else getattr(torch, stored.dtype)
    return combined(specs, num_blocks, codes, device, *opens, **options)
