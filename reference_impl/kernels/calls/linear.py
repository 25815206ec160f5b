"""Linear layers as Llama 8B calls them (4096 inputs, 4096 outputs): every tile of every kernel, each where it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from reference_impl.kernels import gemm, gemm_fp8, gemm_w4a16, gemm_w8a16
from reference_impl.kernels.calls.meta import Call, empty
from reference_impl.kernels.launch import architecture

_IN = _OUT = 4096


def _tiled(call: Callable[[gemm.Tile, torch.dtype], Any], tile: gemm.Tile) -> Call:
    return lambda dtype: call(tile, dtype) if tile.fits(architecture()) else None


def _gemm(tile: gemm.Tile, dtype: torch.dtype) -> Any:
    x, weight = empty(tile.block_m, _IN, dtype=dtype), empty(_OUT, _IN, dtype=dtype)
    return gemm.gemm_with(tile, x, weight, empty(_OUT, dtype=dtype))


def _gemm_fp8(tile: gemm.Tile, dtype: torch.dtype) -> Any:
    tokens, fp8, scale = tile.block_m, torch.float8_e4m3fn, torch.float32
    codes, weight = empty(tokens, _IN, dtype=fp8), empty(_OUT, _IN, dtype=fp8)
    return gemm_fp8.gemm_fp8_with(tile, codes, empty(tokens, dtype=scale), weight, empty(_OUT, dtype=scale), dtype)


def _gemm_w4a16(tile: gemm.Tile, dtype: torch.dtype, with_zeros: bool = False) -> Any:
    groups = _IN // tile.block_k
    zeros = empty(groups, _OUT, dtype=torch.uint8) if with_zeros else None
    x, packed = empty(tile.block_m, _IN, dtype=dtype), empty(_OUT, _IN // 2, dtype=torch.uint8)
    return gemm_w4a16.gemm_w4a16_with(tile, x, packed, empty(groups, _OUT, dtype=dtype), zeros)


def _gemm_w8a16(tile: gemm.Tile, dtype: torch.dtype, group_size: int = _IN) -> Any:
    x, weight = empty(tile.block_m, _IN, dtype=dtype), empty(_OUT, _IN, dtype=torch.int8)
    return gemm_w8a16.gemm_w8a16_with(tile, x, weight, empty(_IN // group_size, _OUT, dtype=dtype))


def _name(kernel: str, tile: gemm.Tile, note: str = "") -> str:
    return f"{kernel}, {tile.block_m}x{tile.block_n}x{tile.block_k} in {tile.num_stages} stages{note}"


CALLS: dict[str, Call] = {
    _name(kernel, tile): _tiled(call, tile)
    for kernel, call, tiles in (
        ("gemm", _gemm, gemm.TILES),
        ("gemm_fp8", _gemm_fp8, gemm_fp8.TILES),
        ("gemm_w4a16", _gemm_w4a16, gemm_w4a16.TILES),
        ("gemm_w8a16", _gemm_w8a16, gemm_w8a16.TILES),
    )
    for tile in tiles
}
# What else may be asked of the 4 and 8 bits: in the largest tile and the smallest.
CALLS |= {
    _name("gemm_w4a16", tile, ", zeros"): _tiled(lambda t, dtype: _gemm_w4a16(t, dtype, with_zeros=True), tile)
    for group_size in (32, 128)
    for tile in (replace(gemm_w4a16.TILES[i], block_k=group_size) for i in (0, -1))
}
CALLS |= {
    _name("gemm_w8a16", tile, ", groups"): _tiled(lambda t, dtype: _gemm_w8a16(t, dtype, group_size=128), tile)
    for tile in (gemm_w8a16.TILES[0], gemm_w8a16.TILES[-1])
}
CALLS["quantize_rows_fp8"] = lambda dtype: gemm_fp8.quantize_rows_fp8(empty(16, _IN, dtype=dtype))
