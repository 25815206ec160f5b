"""Products with weights of 4 and 8 bits against their twins and float64, in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.gemm import choose, grid_of
from reference_impl.kernels.gemm_w4a16 import TILES as W4_TILES
from reference_impl.kernels.gemm_w4a16 import gemm_w4a16
from reference_impl.kernels.gemm_w8a16 import TILES as W8_TILES
from reference_impl.kernels.gemm_w8a16 import gemm_w8a16
from reference_impl.kernels.quantize_rows import quantize_rows_int8
from reference_impl.kernels.reference import pack_int4, unpack_int4
from tests.kernels.paged import DEVICE, check
from tests.kernels.test_gemm_kernels import inside_nan, normal

DTYPES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def integers(*shape: int, low: int = 0, high: int = 16, seed: int = 1) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def scales_of(groups: int, outputs: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (0.5 + normal(groups, outputs, dtype=torch.float32, seed=3).abs()).to(dtype) / 40


# 4 bits


def test_low_and_high_nibbles_are_the_halves_of_a_group() -> None:
    codes = torch.arange(64)[None] % 16
    packed = pack_int4(codes, group_size=32)
    assert packed.shape == (1, 32)
    assert packed.dtype is torch.uint8
    assert packed[0, 0] == 0 + 16 * 0  # codes 0 and 16 of group 0
    assert packed[0, 3] == 3 + 16 * 3
    assert packed[0, 16 + 5] == 5 + 16 * 5  # codes 32 + 5 and 32 + 21
    codes = integers(6, 384)
    assert not torch.equal(pack_int4(codes, 128), pack_int4(codes, 64))
    for group_size in (32, 64, 128):
        assert torch.equal(unpack_int4(pack_int4(codes, group_size), group_size).long(), codes)


def test_codes_that_are_no_nibbles_and_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="expected codes 0 to 15, got -8 to 7"):
        pack_int4(torch.arange(-8, 8).repeat(1, 8))
    with pytest.raises(ValueError, match="divides in = 192, got 128"):
        pack_int4(integers(2, 192))
    x, packed = normal(2, 128), pack_int4(integers(5, 128))
    with pytest.raises(ValueError, match=r"expected scales or zeros .* = \[1, 5\], contiguous, got \[5, 1\]"):
        gemm_w4a16(x, packed, scales_of(5, 1))
    with pytest.raises(ValueError, match=r"\[2, 5\]"):
        gemm_w4a16(x, packed, scales_of(1, 5), group_size=64)
    with pytest.raises(ValueError, match="x in 16 bits and groups of 32, 64 or 128"):
        gemm_w4a16(x.float(), packed, scales_of(1, 5))
    with pytest.raises(ValueError, match="expected packed codes in uint8, .* got torch.int8"):
        gemm_w4a16(x, packed.view(torch.int8), scales_of(1, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize(("tokens", "groups", "outputs"), [(1, 1, 1), (3, 17, 65), (17, 3, 130), (70, 2, 64)])
def test_gemm_w4a16_of_ragged_shapes(tokens, groups, outputs, with_zeros, group_size, dtype) -> None:
    inputs = groups * group_size
    x = inside_nan(normal(tokens, inputs, dtype=dtype))
    packed = pack_int4(integers(outputs, inputs), group_size)
    zeros = integers(groups, outputs, seed=5).to(torch.uint8) if with_zeros else None
    check(gemm_w4a16, reference.gemm_w4a16, (x, packed, scales_of(groups, outputs, dtype), zeros, group_size))


@pytest.mark.parametrize("tile", W4_TILES, ids=str)
def test_gemm_w4a16_in_every_tile(tile) -> None:
    tile = replace(tile, block_k=32)
    tokens, outputs, groups = tile.block_m + 1, tile.block_n + 1, 9
    assert grid_of(tile, tokens, outputs, groups * 32, ARCHITECTURES["sm_90"])[1] > 1
    packed, zeros = pack_int4(integers(outputs, groups * 32), 32), integers(groups, outputs, seed=5)
    x, scales = normal(tokens, groups * 32), scales_of(groups, outputs)
    check(partial(gemm_w4a16, tile=tile), reference.gemm_w4a16, (x, packed, scales, zeros.to(torch.uint8), 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [None, 0, 15])
def test_every_code_and_zero_becomes_its_exact_number(zero, dtype) -> None:
    """x picks one input each: row i of y is the weight's column i."""
    codes = torch.arange(16, device=DEVICE).repeat(2, 8)  # [out 2, in 128]
    zeros = None if zero is None else torch.full((1, 2), zero, device=DEVICE, dtype=torch.uint8)
    scales = torch.tensor([[1.0, -0.125]], device=DEVICE, dtype=dtype)
    y = gemm_w4a16(torch.eye(128, device=DEVICE, dtype=dtype), pack_int4(codes), scales, zeros)
    assert torch.equal(y.float(), (codes - (8 if zero is None else zero)).T * scales.float())


def test_scales_and_zeros_may_have_another_dtype() -> None:
    x, packed = normal(2, 256), pack_int4(integers(7, 256))
    arguments = x, packed, scales_of(2, 7, torch.float32), integers(2, 7, seed=5).float()
    check(gemm_w4a16, reference.gemm_w4a16, arguments)


# 8 bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "inputs", "groups", "outputs"),
    [
        *((1, 1, 1, 1), (3, 1032, 1, 65), (17, 100, 1, 130), (70, 72, 1, 64)),  # a scale per output
        *((3, 1280, 10, 65), (17, 96, 3, 130), (70, 384, 4, 64)),  # groups of 128, 32 and 96
    ],
)
def test_gemm_w8a16_of_ragged_shapes(tokens, inputs, groups, outputs, dtype) -> None:
    x, weight = inside_nan(normal(tokens, inputs, dtype=dtype)), integers(outputs, inputs, low=-128, high=128)
    check(gemm_w8a16, reference.gemm_w8a16, (x, weight.to(torch.int8), scales_of(groups, outputs, dtype)))


@pytest.mark.parametrize("groups", [1, 9])
@pytest.mark.parametrize("tile", W8_TILES, ids=str)
def test_gemm_w8a16_in_every_tile(tile, groups) -> None:
    tile = replace(tile, block_k=32)
    tokens, outputs = tile.block_m + 1, tile.block_n + 1
    weight = integers(outputs, 288, low=-128, high=128).to(torch.int8)
    assert grid_of(tile, tokens, outputs, 288, ARCHITECTURES["sm_90"])[1] > 1
    arguments = normal(tokens, 288), weight, scales_of(groups, outputs)
    check(partial(gemm_w8a16, tile=tile), reference.gemm_w8a16, arguments)


def test_groups_of_eight_bits_that_a_step_cannot_respect_are_refused() -> None:
    x, weight = normal(2, 96), integers(5, 96).to(torch.int8)
    with pytest.raises(ValueError, match="groups of a multiple of 32 that divide in = 96, got torch.float16 and 6"):
        gemm_w8a16(x, weight, scales_of(6, 5))
    with pytest.raises(ValueError, match=r"expected scales or zeros .* = \[1, 5\]"):
        gemm_w8a16(x, weight, scales_of(1, 4))
    with pytest.raises(ValueError, match="expected a weight in int8 .* got torch.uint8"):
        gemm_w8a16(x, weight.view(torch.uint8), scales_of(1, 5))
    with pytest.raises(ValueError, match="scales of one group or more, got torch.int8, 0"):
        gemm_w8a16(x, weight, scales_of(0, 5))


# Both


def test_no_tokens_launch_nothing() -> None:
    assert gemm_w4a16(normal(0, 128), pack_int4(integers(5, 128)), scales_of(1, 5)).shape == (0, 5)
    assert gemm_w8a16(normal(0, 64), integers(5, 64).to(torch.int8), scales_of(1, 5)).shape == (0, 5)
    empty = torch.empty_strided((0, 64), (0, 0), dtype=torch.float16, device=DEVICE)  # as of an empty array of NumPy
    assert gemm_w8a16(empty, integers(5, 64).to(torch.int8), scales_of(1, 5)).shape == (0, 5)
    assert quantize_rows_int8(empty)[0].shape == (0, 64)


def test_every_gpu_has_tiles_for_weights_of_few_bits() -> None:
    for gpu in ARCHITECTURES.values():
        for tokens in (1, 17, 33, 65, 5000):
            assert choose(W4_TILES, tokens, 4096, gpu).fits(gpu)
            assert choose(W8_TILES, tokens, 4096, gpu).fits(gpu)


def test_few_tokens_take_wide_tiles_where_two_splits_of_them_are_enough() -> None:
    hopper = ARCHITECTURES["sm_90"]
    assert [choose(W4_TILES, 1, outputs, hopper).block_n for outputs in (4096, 8448, 14336)] == [64, 128, 128]
    assert grid_of(choose(W4_TILES, 1, 14336, hopper), 1, 14336, 4096, hopper) == (112, 2)
