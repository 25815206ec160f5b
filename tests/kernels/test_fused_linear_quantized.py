"""Linear layers of few tokens with norm, gate and residual, and weights of 8 or 4 bits: against twins and float64."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.fused_linear import EIGHT_BIT_TILES, fused_linear
from reference_impl.kernels.fused_linear_w4a16 import TILES as W4_TILES
from reference_impl.kernels.fused_linear_w4a16 import fused_linear_w4a16
from reference_impl.kernels.gemm import choose, grid_of
from tests.kernels.compile_table import TABLE
from tests.kernels.paged import check
from tests.kernels.test_fused_linear import AROUND, operands
from tests.kernels.test_gemm_kernels import normal
from tests.kernels.test_gemm_of_quantized_weights import DTYPES, integers, scales_of

FP8, INT8 = torch.float8_e4m3fn, torch.int8
KINDS = [kind for kind in AROUND if kind in ("nothing", "all", "norm and GeGLU, biases", "residual")]


def around(kind: str, tokens: int, inputs: int, rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """x, bias, norm, residual."""
    x, _, *others = operands(tokens, inputs, rows, dtype, **AROUND[kind])
    return x, *others


def eight_bits(rows: int, inputs: int, weight: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scale) of a row's. What lies around the codes is the largest code."""
    codes, scale = reference.to_eight_bits(normal(rows, inputs, dtype=torch.float32, seed=1) * 0.1, weight)
    room = torch.full((rows + 1, inputs + 16), 127, device=codes.device).to(weight)
    room.view(torch.uint8)[:rows, :inputs] = codes.view(torch.uint8)
    return room[:rows, :inputs], scale


def check_eight_bits(given: tuple[Any, ...], weight: tuple[Tensor, Tensor], kind: str, kernel: Any) -> None:
    def of(function: Any) -> Any:
        return lambda x, scale, bias, norm, residual: function(
            x, weight[0], bias, weight_scale=scale, norm=norm, eps=1e-3, gate=AROUND[kind].get("gate"),
            residual=residual,
        )  # fmt: skip

    x, *others = given
    check(of(kernel), of(reference.fused_linear), (x, weight[1], *others))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [FP8, INT8])
def test_eight_bits_in_ragged_shapes(weight, dtype) -> None:
    for kind in KINDS:
        for shape in [(1, 33, 6), (3, 1032, 66), (17, 100, 64), (64, 72, 130)]:
            codes = eight_bits(shape[2], shape[1], weight)
            check_eight_bits(around(kind, *shape, dtype), codes, kind, fused_linear)


@pytest.mark.parametrize("tile", EIGHT_BIT_TILES, ids=str)
def test_eight_bits_in_every_tile(tile) -> None:
    tokens, inputs, rows = tile.block_m - 1, 8 * tile.block_k + 8, 2 * tile.block_n + 2
    assert grid_of(tile, tokens, rows, inputs, ARCHITECTURES["sm_90"])[1] > 1
    check_eight_bits(
        around("all", tokens, inputs, rows, torch.float16), eight_bits(rows, inputs, FP8), "all",
        partial(fused_linear, tile=tile),
    )  # fmt: skip


def test_eight_bits_without_scales_and_scales_without_eight_bits_are_refused() -> None:
    codes, scale = eight_bits(6, 32, INT8)
    for weight, given in ((codes, None), (normal(6, 32), scale), (codes, scale[:5])):
        with pytest.raises(
            ValueError, match=r"expected scales \[6\], contiguous, with a weight of 8 bits, and only then"
        ):
            fused_linear(normal(2, 32), weight, weight_scale=given)


def check_four_bits(
    given: tuple[Any, ...], codes: Tensor, group_size: int, kind: str, kernel: Any, zeros: Tensor | None = None
) -> None:
    packed = inside_nan_of_bytes(reference.pack_int4(codes, group_size))
    scales = scales_of(codes.shape[1] // group_size, len(codes), given[0].dtype)

    def of(function: Any) -> Any:
        return lambda x, scales, bias, norm, residual: function(
            x, packed, scales, bias, zeros=zeros, norm=norm, eps=1e-3, gate=AROUND[kind].get("gate"), residual=residual
        )

    x, *others = given
    check(of(kernel), of(reference.fused_linear_w4a16), (x, scales, *others))


def inside_nan_of_bytes(packed: Tensor) -> Tensor:
    room = torch.full((len(packed) + 1, packed.shape[1] + 16), 255, dtype=torch.uint8, device=packed.device)
    room[: len(packed), : packed.shape[1]] = packed
    return room[: len(packed), : packed.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_four_bits_in_ragged_shapes(group_size, dtype) -> None:
    for kind in KINDS:
        for tokens, groups, rows in [(1, 1, 6), (3, 8, 66), (17, 3, 64), (64, 2, 130)]:
            inputs = groups * group_size
            given = around(kind, tokens, inputs, rows, dtype)
            check_four_bits(given, integers(rows, inputs), group_size, kind, fused_linear_w4a16)


@pytest.mark.parametrize("tile", W4_TILES, ids=str)
def test_four_bits_in_every_tile(tile) -> None:
    tile = replace(tile, block_k=32)
    tokens, inputs, rows = tile.block_m - 1, 8 * 32, 2 * tile.block_n + 2
    assert grid_of(tile, tokens, rows, inputs, ARCHITECTURES["sm_90"])[1] > 1
    check_four_bits(
        around("all", tokens, inputs, rows, torch.float16), integers(rows, inputs), 32, "all",
        partial(fused_linear_w4a16, tile=tile),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["nothing", "all"])
def test_zero_points_of_a_fused_product(kind: str) -> None:
    """Against the decoded weight in a product of 16 bits, in float64: (code - zero) x scale, worked out here."""
    tokens, groups, rows = 3, 9, 66
    x, bias, norm, residual = around(kind, tokens, groups * 32, rows, torch.float16)
    codes, zeros, scales = integers(rows, groups * 32), integers(groups, rows, seed=5), scales_of(groups, rows)
    found = fused_linear_w4a16(
        x, reference.pack_int4(codes, 32), scales, bias, zeros=zeros.to(torch.uint8), norm=norm, eps=1e-3,
        gate=AROUND[kind].get("gate"), residual=residual,
    )  # fmt: skip
    weight = torch.empty(rows, groups * 32, dtype=torch.float64, device=x.device)
    for g in range(groups):
        within = slice(32 * g, 32 * g + 32)
        weight[:, within] = (codes[:, within] - zeros[g][:, None]) * scales[g].double()[:, None]
    doubles = [None if t is None else t.double() for t in (bias, norm, residual)]
    exact = reference.fused_linear(
        x.double(), weight, doubles[0], norm=doubles[1], eps=1e-3, gate=AROUND[kind].get("gate"), residual=doubles[2]
    )
    assert float((found.double() - exact).abs().max()) <= 4e-3 * float(exact.abs().max())


def test_of_four_bits_what_does_not_fit_is_refused() -> None:
    x, packed, scales = normal(2, 128), reference.pack_int4(integers(6, 128)), scales_of(1, 6)
    with pytest.raises(ValueError, match="x in 16 bits and groups of 32, 64 or 128"):
        fused_linear_w4a16(x.float(), packed, scales)
    with pytest.raises(ValueError, match=r"expected scales or zeros .* = \[1, 6\]"):
        fused_linear_w4a16(x, packed, scales_of(1, 5))
    with pytest.raises(ValueError, match=r"expected scales or zeros .* = \[1, 6\]"):
        fused_linear_w4a16(x, packed, scales, zeros=scales_of(1, 5))
    with pytest.raises(ValueError, match="expected at most 64 tokens"):
        fused_linear_w4a16(normal(65, 128), packed, scales)


def test_every_gpu_has_a_tile_and_hopper_uses_its_matrix_instructions() -> None:
    for gpu in ARCHITECTURES.values():
        for tiles in (EIGHT_BIT_TILES, W4_TILES):
            assert all(choose(tiles, n, 4096, gpu).fits(gpu) for n in (1, 17, 64))
            assert all(choose(tiles, n, 4096, gpu).block_m >= n for n in (1, 17, 64))
    entries = {
        line: entry for line, entry in json.loads(TABLE.read_text()).items()
        if line.endswith(", sm_90") and ("weight of" in line or "fused_linear_w4a16" in line)
    }  # fmt: skip
    assert len(entries) == 2 * (len(EIGHT_BIT_TILES) + len(W4_TILES)) + 2, "and two with zeros"
    assert all(set(entry["matrix_instructions"]) == {"HGMMA"} for entry in entries.values())
