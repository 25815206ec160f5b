"""Calls of host functions that launch nothing: with tensors that have a shape and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference_impl.kernels.gemm import Tile
from reference_impl.kernels.launch import architecture

Call = Callable[[torch.dtype], Any]  # a host function with tensors on the meta device, given the activations' dtype


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scales(blocks: int, kv_heads: int, block_size: int, cache: torch.dtype) -> Tensor:
    """The scales of a cache's keys, with the cache's strides: [blocks, block_size, kv_heads] float32, or for a cache of
    4 bits [blocks, block_size, kv_heads, 2] float16."""
    if cache is torch.uint8:
        return empty(blocks, 2, kv_heads, block_size, dtype=torch.float16).permute(0, 3, 2, 1)
    return empty(blocks, kv_heads, block_size, dtype=torch.float32).mT


def in_tile(tile: Tile, call: Callable[[Tile, torch.dtype], Any]) -> Call:
    """The call with this tile; launches nothing on an architecture where the tile does not fit."""
    return lambda dtype: call(tile, dtype) if tile.fits(architecture()) else None


def name_in_tile(name: str, tile: Tile, note: str = "") -> str:
    return f"{name}, {tile.block_m}x{tile.block_n}x{tile.block_k} in {tile.num_stages} stages{note}"
