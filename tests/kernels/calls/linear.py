"""Linear layers of a Llama 8B (4096 inputs, 4096 outputs): every tile of every kernel, each where it fits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from reference_impl.kernels import (
    gemm,
    gemm_fp4,
    gemm_fp8,
    gemm_fp8_blocks,
    gemm_w4a16,
    gemm_w8a8,
    gemm_w8a16,
    quantize_rows,
)
from reference_impl.kernels.gemm import Tile
from tests.kernels.calls.meta import Call, empty, in_tile, name_in_tile

_IN = _OUT = 4096


def _gemm(tile: Tile, dtype: torch.dtype) -> Any:
    x, weight = empty(tile.block_m, _IN, dtype=dtype), empty(_OUT, _IN, dtype=dtype)
    return gemm.gemm(x, weight, empty(_OUT, dtype=dtype), tile=tile)


def _gemm_fp8(tile: Tile, dtype: torch.dtype) -> Any:
    codes, weight = (empty(rows, _IN, dtype=torch.float8_e4m3fn) for rows in (tile.block_m, _OUT))
    scale, weight_scale = (empty(rows, dtype=torch.float32) for rows in (tile.block_m, _OUT))
    return gemm_fp8.gemm_fp8(codes, scale, weight, weight_scale, dtype, tile=tile)


def _gemm_fp8_blocks(tile: Tile, dtype: torch.dtype) -> Any:
    codes, weight = (empty(rows, _IN, dtype=torch.float8_e4m3fn) for rows in (tile.block_m, _OUT))
    scale, blocks = (empty(rows, _IN // 128, dtype=torch.float32) for rows in (tile.block_m, _OUT // 128))
    return gemm_fp8_blocks.gemm_fp8_blocks(codes, scale, weight, blocks, dtype, tile=tile)


def _gemm_w8a8(tile: Tile, dtype: torch.dtype) -> Any:
    codes, weight = (empty(rows, _IN, dtype=torch.int8) for rows in (tile.block_m, _OUT))
    scale, weight_scale = (empty(rows, dtype=torch.float32) for rows in (tile.block_m, _OUT))
    return gemm_w8a8.gemm_w8a8(codes, scale, weight, weight_scale, dtype, tile=tile)


def _gemm_fp4(tile: Tile, dtype: torch.dtype, group_size: int) -> Any:
    x, packed = empty(tile.block_m, _IN, dtype=dtype), empty(_OUT, _IN // 2, dtype=torch.uint8)
    tensor_scale = empty(_OUT, dtype=torch.float32) if group_size == 16 else None
    return gemm_fp4.gemm_fp4(x, packed, empty(_OUT, _IN // group_size, dtype=torch.uint8), tensor_scale, tile=tile)


def _gemm_w4a16(tile: Tile, dtype: torch.dtype, with_zeros: bool = False) -> Any:
    groups = _IN // tile.block_k
    zeros = empty(groups, _OUT, dtype=torch.uint8) if with_zeros else None
    x, packed = empty(tile.block_m, _IN, dtype=dtype), empty(_OUT, _IN // 2, dtype=torch.uint8)
    scales = empty(groups, _OUT, dtype=dtype)
    return gemm_w4a16.gemm_w4a16(x, packed, scales, zeros, tile.block_k, tile=tile)


def _gemm_w8a16(tile: Tile, dtype: torch.dtype, group_size: int = _IN) -> Any:
    x, weight = empty(tile.block_m, _IN, dtype=dtype), empty(_OUT, _IN, dtype=torch.int8)
    return gemm_w8a16.gemm_w8a16(x, weight, empty(_IN // group_size, _OUT, dtype=dtype), tile=tile)


CALLS: dict[str, Call] = {
    name_in_tile(kernel, tile): in_tile(tile, call)
    for kernel, call, tiles in (
        ("gemm", _gemm, gemm.TILES),
        ("gemm_fp8", _gemm_fp8, gemm_fp8.TILES),
        ("gemm_fp8_blocks", _gemm_fp8_blocks, gemm_fp8_blocks.TILES),
        ("gemm_w8a8", _gemm_w8a8, gemm_w8a8.TILES),
        ("gemm_fp4, NVFP4", partial(_gemm_fp4, group_size=16), gemm_fp4.TILES),
        ("gemm_fp4, MXFP4", partial(_gemm_fp4, group_size=32), gemm_fp4.TILES),
        ("gemm_w4a16", _gemm_w4a16, gemm_w4a16.TILES),
        ("gemm_w8a16", _gemm_w8a16, gemm_w8a16.TILES),
    )
    for tile in tiles
}
# The other options of the products with 4 and 8 bits: in the largest tile and the smallest.
CALLS |= {
    name_in_tile("gemm_w4a16", tile, ", zeros"): in_tile(tile, partial(_gemm_w4a16, with_zeros=True))
    for group_size in (32, 128)
    for tile in (replace(gemm_w4a16.TILES[i], block_k=group_size) for i in (0, -1))
}
CALLS |= {
    name_in_tile("gemm_w8a16", tile, ", groups"): in_tile(tile, partial(_gemm_w8a16, group_size=128))
    for tile in (gemm_w8a16.TILES[0], gemm_w8a16.TILES[-1])
}
CALLS["quantize_rows_fp8"] = lambda dtype: quantize_rows.quantize_rows_fp8(empty(16, _IN, dtype=dtype))
CALLS["quantize_rows_int8"] = lambda dtype: quantize_rows.quantize_rows_int8(empty(16, _IN, dtype=dtype))
CALLS["quantize_groups_fp8"] = lambda dtype: quantize_rows.quantize_groups_fp8(empty(16, _IN, dtype=dtype))
