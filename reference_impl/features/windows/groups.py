"""Layers that keep the same positions form a KV group; all groups of a model have the same number of layers.

A full layer keeps everything, a layer with a sliding window only what its window still shows. With a pool for each, the
split of memory between them would have to be guessed. With groups of equal size a block fits any of them, and one pool
serves all (as in vLLM's hybrid KV cache manager).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reference_impl.interfaces import KVSpec


def kv_specs(
    layer_windows: Sequence[int | None],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    bits_per_value: int,
    **widths: Any,
) -> tuple[KVSpec, ...]:
    """The specs of a model's KV groups. layer_windows: the window of each layer, or None where it sees everything
    before it. widths: further fields of `KVSpec`."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        kinds.setdefault(window, []).append(layer)
    size = math.gcd(*map(len, kinds.values()))
    one = KVSpec(size, num_kv_heads, head_dim, block_size, bits_per_value=bits_per_value, **widths)
    return tuple(
        replace(one, layers=tuple(layers[i : i + size]), window=window)
        for window, layers in kinds.items()
        for i in range(0, len(layers), size)
    )


def of_stage(specs: Sequence[KVSpec], stage: range) -> tuple[KVSpec, ...]:
    """The same groups with the layers of a stage only. ValueError where a group has none there."""
    own = [[layer for layer in spec.layers if layer in stage] for spec in specs]
    for spec, layers in zip(specs, own, strict=True):
        if not layers:
            raise ValueError(
                f"pipeline_parallel_size: layers {stage.start} to {stage.stop - 1} have none of the KV group with "
                f"layers {', '.join(map(str, spec.layers))} and window {spec.window}: expected fewer stages"
            )
    most = max(map(len, own))
    return tuple(replace(spec, num_layers=most, layers=tuple(layers)) for spec, layers in zip(specs, own, strict=True))


def longest_sequence(num_blocks: int, block_size: int, windows: Sequence[int | None], max_chunk: int) -> int:
    """The most tokens that a single request can have in the cache. max_chunk: the most tokens computed in one step."""

    def needed(tokens: int) -> int:
        whole = -(-tokens // block_size)
        # What a window shows, the chunk being written, and a block that both begin and end inside of.
        return sum(whole if w is None else min(whole, -(-(w + max_chunk) // block_size) + 1) for w in windows)

    fits, too_many = 0, num_blocks * block_size + 1
    if None not in windows and needed(too_many) <= num_blocks:
        return too_many * 2**32  # every window fits, however long the sequence gets
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if needed(middle) <= num_blocks else (fits, middle)
    return fits
