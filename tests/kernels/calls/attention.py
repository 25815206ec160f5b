"""Attention with the sizes of a Llama, and its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels.paged_decode import paged_decode
from tests.kernels.calls.meta import Call, empty, scales


def _attention(
    function: Callable[..., Tensor],
    head_dim: int,
    group: int = 4,
    cache: torch.dtype | None = None,
    tree: bool = False,
    **options: Any,
) -> Call:
    """A call with a Llama's 8 KV heads, blocks of 16. cache: its dtype, if not that of q; tree: with ancestors."""
    rows, kv_heads, blocks, block_size = 64, 8, 1000, 16

    def call(dtype: torch.dtype) -> Tensor:
        given = dict(options)
        if cache is not None:
            scale = scales(blocks, kv_heads, block_size, cache)
            given |= {"key_scale": scale, "value_scale": scale}
        if tree:
            given["ancestors"] = empty(rows, dtype=torch.int64)
        q = empty(rows, kv_heads * group, head_dim, dtype=dtype)
        stored = empty(blocks, block_size, kv_heads, head_dim // (1 + (cache is torch.uint8)), dtype=cache or dtype)
        table, seq_lens = empty(rows, 256, dtype=torch.int32), empty(rows, dtype=torch.int32)
        if function is paged_decode:
            return function(q, stored, stored, table, seq_lens, 4096, head_dim**-0.5, **given)
        query_start_loc = empty(rows + 1, dtype=torch.int32)
        return function(q, stored, stored, table, query_start_loc, seq_lens, head_dim**-0.5, **given)

    return call


CALLS: dict[str, Call] = {
    f"{function.__name__}, {name}": _attention(function, **options)
    for function in (flash_attention, paged_decode)
    for name, options in (
        ("head_dim 64", {"head_dim": 64}),
        ("head_dim 128", {"head_dim": 128}),
        ("head_dim 256", {"head_dim": 256}),
        ("MHA", {"head_dim": 64, "group": 1}),
        ("window", {"head_dim": 128, "window": 4096}),
        ("soft cap", {"head_dim": 256, "softcap": 50.0}),
        ("int8 cache", {"head_dim": 128, "cache": torch.int8}),
        ("fp8 cache", {"head_dim": 128, "cache": torch.float8_e4m3fn}),
        ("e5m2 cache", {"head_dim": 128, "cache": torch.float8_e5m2}),
        ("int4 cache", {"head_dim": 128, "cache": torch.uint8}),
        ("head_dim 64, int4 cache", {"head_dim": 64, "cache": torch.uint8}),
        ("head_dim 256, int4 cache", {"head_dim": 256, "cache": torch.uint8}),
    )
}
# Where tiles of 64 keys would spill; the 71 heads are Falcon's.
CALLS |= {
    "paged_decode, head_dim 256, int8 cache": _attention(paged_decode, 256, cache=torch.int8),
    "paged_decode, head_dim 256, 32 heads": _attention(paged_decode, 256, group=32),
    "paged_decode, 71 heads": _attention(paged_decode, 64, group=71),
}
CALLS |= {
    "flash_attention, tree": _attention(flash_attention, 128, tree=True),
    "flash_attention, tree, window": _attention(flash_attention, 128, tree=True, window=4096),
    "flash_attention, tree, int8 cache": _attention(flash_attention, 128, tree=True, cache=torch.int8),
    "flash_attention, tree, int4 cache": _attention(flash_attention, 128, tree=True, cache=torch.uint8),
    "flash_attention, tree, head_dim 256": _attention(flash_attention, 256, tree=True),
    "flash_attention, skip-softmax": _attention(flash_attention, 128, skip_threshold=1e-3),
}
