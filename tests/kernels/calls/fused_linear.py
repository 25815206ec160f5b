"""Linear layers fused with their neighbours, with the sizes of a Llama of 8 billion parameters, for few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reference_impl.kernels import fused_linear, fused_linear_w4a16
from reference_impl.kernels.gemm import Tile
from reference_impl.kernels.reference import Activation
from tests.kernels.calls.meta import Call, empty, in_tile, name_in_tile

_HIDDEN, _QKV, _INTERMEDIATE = 4096, 6144, 14336

Tiled = Callable[[Tile, torch.dtype], Any]


def _norm_and(rows: int, gate: Activation | None, bias: bool = False) -> Tiled:
    def call(tile: Tile, dtype: torch.dtype) -> Any:
        x, weight = empty(tile.block_m, _HIDDEN, dtype=dtype), empty(rows, _HIDDEN, dtype=dtype)
        given = (x, weight, empty(rows, dtype=dtype) if bias else None)
        norm = empty(_HIDDEN, dtype=torch.float32 if gate == "gelu_tanh" else dtype)  # Gemma's is 1 + w
        return fused_linear.fused_linear(*given, norm=norm, eps=1e-5, gate=gate, tile=tile)

    return call


def _and_residual(inputs: int) -> Tiled:
    def call(tile: Tile, dtype: torch.dtype) -> Any:
        x, weight = empty(tile.block_m, inputs, dtype=dtype), empty(_HIDDEN, inputs, dtype=dtype)
        return fused_linear.fused_linear(x, weight, residual=empty(tile.block_m, _HIDDEN, dtype=dtype), tile=tile)

    return call


def _eight_bits(weight: torch.dtype) -> Tiled:
    rows = 2 * _INTERMEDIATE

    def call(tile: Tile, dtype: torch.dtype) -> Any:
        x, codes = empty(tile.block_m, _HIDDEN, dtype=dtype), empty(rows, _HIDDEN, dtype=weight)
        scale, norm = empty(rows, dtype=torch.float32), empty(_HIDDEN, dtype=dtype)
        return fused_linear.fused_linear(x, codes, weight_scale=scale, norm=norm, eps=1e-5, gate="silu", tile=tile)

    return call


def _four_bits(inputs: int, rows: int, gate: Activation | None, with_zeros: bool = False) -> Tiled:
    """Calls with a gate and a norm, or without a gate and with a residual."""

    def call(tile: Tile, dtype: torch.dtype) -> Any:
        x, packed = empty(tile.block_m, inputs, dtype=dtype), empty(rows, inputs // 2, dtype=torch.uint8)
        norm, residual = (empty(inputs, dtype=dtype), None) if gate else (None, empty(tile.block_m, rows, dtype=dtype))
        scales = empty(inputs // tile.block_k, rows, dtype=dtype)
        zeros = empty(*scales.shape, dtype=torch.uint8) if with_zeros else None
        return fused_linear_w4a16.fused_linear_w4a16(
            x,
            packed,
            scales,
            zeros=zeros,
            norm=norm,
            eps=1e-5 if gate else 0.0,
            gate=gate,
            residual=residual,
            tile=tile,
        )

    return call


CALLS: dict[str, Call] = {
    name_in_tile(f"{kernel}, {name}", tile): in_tile(tile, call)
    for kernel, tiles, calls in (
        (
            "fused_linear",
            fused_linear.TILES,
            {
                "norm and qkv": _norm_and(_QKV, None),
                "norm, gate and up, SwiGLU": _norm_and(2 * _INTERMEDIATE, "silu"),
                "o and residual": _and_residual(_HIDDEN),
                "down and residual": _and_residual(_INTERMEDIATE),
            },
        ),
        (
            "fused_linear",
            fused_linear.EIGHT_BIT_TILES,
            {"weight of fp8": _eight_bits(torch.float8_e4m3fn), "weight of int8": _eight_bits(torch.int8)},
        ),
        (
            "fused_linear_w4a16",
            fused_linear_w4a16.TILES,
            {
                "norm, gate and up": _four_bits(_HIDDEN, 2 * _INTERMEDIATE, "silu"),
                "down and residual": _four_bits(_INTERMEDIATE, _HIDDEN, None),
            },
        ),
    )
    for tile in tiles
    for name, call in calls.items()
}
# The other options, in the smallest tile.
CALLS |= {
    f"fused_linear, {name}": in_tile(fused_linear.TILES[-1], call)
    for name, call in {
        "norm and qkv with biases": _norm_and(_QKV, None, bias=True),
        "norm, gate and up, GeGLU": _norm_and(2 * _INTERMEDIATE, "gelu_tanh"),
    }.items()
}
# Zero points, in the largest tile and the smallest.
CALLS |= {
    name_in_tile("fused_linear_w4a16, norm, gate and up", tile, ", zeros"): in_tile(
        tile, _four_bits(_HIDDEN, 2 * _INTERMEDIATE, "silu", with_zeros=True)
    )
    for tile in (fused_linear_w4a16.TILES[0], fused_linear_w4a16.TILES[-1])
}
