"""W8A8 in int8, FP8 by block, weights of 4-bit floats: against twins, and against decoded numbers in float64."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.gemm import choose, grid_of
from reference_impl.kernels.gemm_fp4 import TILES as FP4_TILES
from reference_impl.kernels.gemm_fp4 import gemm_fp4
from reference_impl.kernels.gemm_fp8_blocks import TILES as BLOCK_TILES
from reference_impl.kernels.gemm_fp8_blocks import gemm_fp8_blocks
from reference_impl.kernels.gemm_w8a8 import MOST_INPUTS, gemm_w8a8
from reference_impl.kernels.gemm_w8a8 import TILES as W8_TILES
from reference_impl.kernels.quantize_rows import quantize_groups_fp8, quantize_rows_int8
from reference_impl.kernels.reference.linear import FP4_STEP
from reference_impl.models.quantization.numbers import to_values
from reference_impl.models.quantization.scheme import Activations, Scheme, decode, encode, fit
from reference_impl.models.quantization.stored import round_activations
from tests.kernels.compile_table import TABLE
from tests.kernels.paged import DEVICE, check
from tests.kernels.test_gemm_kernels import inside_nan, normal
from tests.kernels.test_gemm_of_quantized_weights import DTYPES, integers

FLOAT32, FP8 = torch.float32, torch.float8_e4m3fn


def within(found: Tensor, exact: Tensor, relative: float) -> None:
    """relative: of the largest element, which is what a rounding of sums is measured by."""
    assert found.isfinite().all()
    assert float((found.double() - exact).abs().max()) <= relative * float(exact.abs().max())


def positive(*shape: int, seed: int = 3) -> Tensor:
    return (0.5 + normal(*shape, dtype=FLOAT32, seed=seed).abs()) / 40


# int8 on both sides


@pytest.mark.parametrize(("tokens", "inputs"), [(1, 1), (5, 100), (3, 5000)])
def test_rows_in_int8_are_rounded_as_compressed_tensors_does(tokens, inputs) -> None:
    x = normal(tokens, inputs, dtype=FLOAT32)
    x[0, -1] = -40  # the largest is the last
    codes, scale = quantize_rows_int8(inside_nan(x))
    assert codes.dtype is torch.int8
    assert int(codes[0, -1]) in (-128, -127), "127.5 lies between"
    expected = round_activations(x, Activations("int8"))
    assert torch.allclose(codes * scale[:, None], expected, rtol=1e-6, atol=0)
    twin = reference.quantize_rows_int8(x)
    assert torch.equal(codes, twin[0])
    assert torch.allclose(scale, twin[1], rtol=1e-6, atol=0)


def test_a_row_of_zeros_and_the_largest_of_a_row_do_no_harm() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-30, -1e-38], [3e38, 1e30], [5.0, 5.0]], device=DEVICE)
    codes, scale = quantize_rows_int8(x)
    assert codes[0].tolist() == [0, 0]
    assert codes[2:].tolist() == [[127, 0], [127, 127]], "127.5 has no code"
    assert (scale > 0).all()


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 1, 1), (1, 1032, 3), (3, 300, 65), (17, 100, 70), (130, 72, 129)]
)
def test_gemm_w8a8_of_ragged_shapes_sums_exactly(tokens, inputs, outputs) -> None:
    """Sums of codes are integers: what is rounded is the result, twice by a scale and once to its dtype."""
    rows, weight = (integers(n, inputs, low=-128, high=128, seed=n).to(torch.int8) for n in (tokens, outputs))
    scale, weight_scale = positive(tokens), positive(outputs, seed=4)
    exact = (rows.double() @ weight.double().T) * scale.double()[:, None] * weight_scale.double()
    room = torch.full((outputs + 1, inputs + 16), 127, dtype=torch.int8, device=DEVICE)
    room[:outputs, :inputs] = weight
    found = gemm_w8a8(rows, scale, room[:outputs, :inputs], weight_scale, FLOAT32)
    assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-7)
    assert torch.allclose(reference.gemm_w8a8(rows, scale, weight, weight_scale, FLOAT32), found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tile", W8_TILES, ids=str)
def test_gemm_w8a8_in_every_tile_and_split(tile) -> None:
    tokens, outputs, inputs = min(tile.block_m, 64) + 1, tile.block_n + 1, 8 * tile.block_k + 8
    assert grid_of(tile, tokens, outputs, inputs, ARCHITECTURES["sm_90"])[1] > 1
    rows, weight = (integers(n, inputs, low=-128, high=128, seed=n).to(torch.int8) for n in (tokens, outputs))
    arguments = rows, positive(tokens), weight, positive(outputs, seed=4), torch.float16
    check(partial(gemm_w8a8, tile=tile), reference.gemm_w8a8, arguments)


def test_sums_beyond_the_24_bits_of_a_float_are_exact() -> None:
    """-128 x -128 all along: 2^14 x 2080 and one is 2^25 + ..., which float32 sums of products would round."""
    inputs = 2080
    rows = torch.full((1, inputs), -128, dtype=torch.int8, device=DEVICE)
    weight = rows.repeat(2, 1)
    weight[1, 0] = 1
    ones = torch.ones(2, device=DEVICE)
    found = gemm_w8a8(rows, ones[:1], weight, ones * 2.0**-14, FLOAT32)
    assert found.tolist() == [[2080.0, (2079 * 2**14 - 128) / 2**14]]


def test_what_int8_products_cannot_take_is_refused() -> None:
    rows, one = torch.ones(1, 32, dtype=torch.int8, device=DEVICE), torch.ones(1, device=DEVICE)
    with pytest.raises(ValueError, match="codes and a weight in int8"):
        gemm_w8a8(rows, one, rows.float(), one)
    with pytest.raises(ValueError, match="a scale for each of 1 tokens and 1 outputs"):
        gemm_w8a8(rows, one, rows, one.repeat(2))
    wide = torch.ones(1, 1, dtype=torch.int8, device=DEVICE).expand(1, MOST_INPUTS + 1)
    with pytest.raises(ValueError, match=f"at most {MOST_INPUTS} inputs"):
        gemm_w8a8(wide.contiguous(), one, wide.contiguous(), one)
    assert gemm_w8a8(rows[:0], one[:0], rows, one).shape == (0, 1)


# FP8 by block


@pytest.mark.parametrize("inputs", [1, 128, 300, 2200])
def test_groups_of_a_row_in_fp8_have_a_scale_each(inputs) -> None:
    x = normal(3, inputs, dtype=FLOAT32) * torch.tensor([[1.0], [1e-4], [300.0]], device=DEVICE)
    codes, scale = quantize_groups_fp8(inside_nan(x))
    for group in range(-(-inputs // 128)):
        largest = x[:, 128 * group : 128 * group + 128].abs().amax(1)
        assert torch.allclose(scale[:, group], largest / 448, rtol=1e-6)
    spread = scale.repeat_interleave(128, 1)[:, :inputs]
    assert float(((codes.float() * spread - x).abs() / spread).max()) <= 16.001, "half of the largest step, 32"
    twin = reference.quantize_groups_fp8(x)
    assert torch.allclose(scale, twin[1], rtol=1e-6, atol=0)
    assert (codes.float() != twin[0].float()).sum() <= 1 + 0.005 * x.numel()


def blocks_of(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, ...]:
    codes, scale = reference.quantize_groups_fp8(normal(tokens, inputs, dtype=FLOAT32))
    weight = (normal(outputs, inputs, dtype=FLOAT32, seed=1) * 100).to(FP8)
    return inside_nan(codes), scale, inside_nan(weight), positive(-(-outputs // 128), -(-inputs // 128))


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 1, 1), (3, 300, 130), (17, 1100, 129), (70, 140, 260)])
def test_fp8_by_block_of_ragged_shapes(tokens, inputs, outputs) -> None:
    codes, scale, weight, blocks = blocks_of(tokens, inputs, outputs)
    exact = torch.zeros(tokens, outputs, dtype=torch.float64, device=DEVICE)
    for g in range(blocks.shape[1]):
        for b in range(blocks.shape[0]):
            k, n = slice(128 * g, 128 * g + 128), slice(128 * b, 128 * b + 128)
            part = (codes[:, k].double() * scale[:, g, None].double()) @ weight[n, k].double().T
            exact[:, n] += part * float(blocks[b, g])
    within(gemm_fp8_blocks(codes, scale, weight, blocks, torch.float16), exact, 2e-3)
    within(reference.gemm_fp8_blocks(codes, scale, weight, blocks, torch.float16), exact, 2e-3)


@pytest.mark.parametrize("tile", BLOCK_TILES, ids=str)
def test_fp8_by_block_in_every_tile_and_split(tile) -> None:
    tokens, outputs, inputs = min(tile.block_m, 64) + 1, tile.block_n + 1, 8 * 128 + 8
    assert grid_of(tile, tokens, outputs, inputs, ARCHITECTURES["sm_90"])[1] > 1
    arguments = *blocks_of(tokens, inputs, outputs), torch.float16
    check(partial(gemm_fp8_blocks, tile=tile), reference.gemm_fp8_blocks, arguments)


def test_scales_that_are_not_one_to_a_block_are_refused() -> None:
    codes, scale, weight, blocks = blocks_of(2, 130, 130)
    for wrong in ((codes, scale[:, :1], weight, blocks), (codes, scale, weight, blocks[:1])):
        with pytest.raises(ValueError, match=r"expected scales \[2, 2\] of tokens and \[2, 2\] of blocks of 128 x 128"):
            gemm_fp8_blocks(*wrong)
    assert gemm_fp8_blocks(codes[:0], scale[:0], weight, blocks).shape == (0, 130)


# 4-bit floats


NVFP4, MXFP4 = Scheme("e2m1", "group", 16, scales="e4m3"), Scheme("e2m1", "group", 32, scales="e8m0")


def four_bit_floats(scheme: Scheme, outputs: int, inputs: int) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """(packed, scales, tensor_scale), and the weight in float32, decoded by `scheme.decode`."""
    weight = normal(outputs, inputs, dtype=FLOAT32, seed=1) * normal(outputs, 1, dtype=FLOAT32, seed=2).exp() * 0.02
    fitted = fit(weight, scheme)
    codes = encode(weight, scheme, fitted)
    bits = fitted.scales.to(FP8).view(torch.uint8) if scheme is NVFP4 else fitted.scales.log2().int() + 127
    tensor_scale = None if fitted.tensor_scale is None else fitted.tensor_scale.repeat(outputs)
    given = reference.pack_int4(codes, FP4_STEP), bits.to(torch.uint8).contiguous(), tensor_scale
    return given, decode(codes, scheme, fitted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [NVFP4, MXFP4], ids=["NVFP4", "MXFP4"])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 64, 1), (3, 576, 65), (17, 192, 130), (70, 64, 64)])
def test_weights_of_four_bit_floats(tokens, inputs, outputs, scheme, dtype) -> None:
    given, weight = four_bit_floats(scheme, outputs, inputs)
    x = inside_nan(normal(tokens, inputs, dtype=dtype))
    exact = x.double() @ weight.double().T
    within(gemm_fp4(x, *given), exact, 2 * torch.finfo(dtype).eps)
    within(reference.gemm_fp4(x, *given), exact, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("powers", [False, True])
def test_every_code_with_every_scale_becomes_its_exact_number(powers, dtype) -> None:
    """x picks one input each. Scales: all of e4m3; of e8m0 those that leave the numbers within float16, and 2^-24."""
    codes = torch.arange(16, device=DEVICE).repeat(126, 4)  # [out 126, in 64]
    picks = torch.eye(64, device=DEVICE, dtype=dtype)
    scales = torch.arange(1, 127, device=DEVICE)
    values = to_values(codes, "e2m1")
    if powers:
        scales = (127 - 23 + scales % 37).to(torch.uint8)  # 2^-23 x 0.5 is float16's smallest; 2^13 x 6 fits
        y = gemm_fp4(picks, reference.pack_int4(codes, 64), scales[:, None].repeat(1, 2))
        factors = torch.exp2(scales.float() - 127)
    else:
        scales = scales.to(torch.uint8)
        one = torch.full((126,), 2.0**-3, device=DEVICE)
        y = gemm_fp4(picks, reference.pack_int4(codes, 64), scales[:, None].repeat(1, 4), one)
        factors = scales.view(FP8).float() / 8
    assert torch.equal(y.float(), (values * factors[:, None]).T)


def test_each_group_of_a_step_has_the_scale_that_is_its_own() -> None:
    codes = torch.full((3, 128), 2, device=DEVICE)  # ones
    scales = (torch.arange(24, device=DEVICE).reshape(3, 8) + 40).to(torch.uint8)
    one = torch.ones(3, device=DEVICE)
    y = gemm_fp4(torch.eye(128, device=DEVICE).half(), reference.pack_int4(codes, 64), scales, one)
    assert torch.equal(y.float().T, scales.view(FP8).float().repeat_interleave(16, 1))


@pytest.mark.parametrize("tile", FP4_TILES, ids=str)
def test_weights_of_four_bit_floats_in_every_tile_and_split(tile) -> None:
    tokens, outputs, inputs = tile.block_m + 1, tile.block_n + 1, 9 * 64
    assert grid_of(tile, tokens, outputs, inputs, ARCHITECTURES["sm_90"])[1] > 1
    given, weight = four_bit_floats(NVFP4, outputs, inputs)
    x = normal(tokens, inputs)
    within(gemm_fp4(x, *given, tile=tile), x.double() @ weight.double().T, 2e-3)


def test_of_four_bit_floats_what_does_not_fit_is_refused() -> None:
    (packed, scales, tensor_scale), _ = four_bit_floats(NVFP4, 5, 128)
    x = normal(2, 128)
    with pytest.raises(ValueError, match="x in 16 bits and a multiple of 64 inputs, got torch.float32"):
        gemm_fp4(x.float(), packed, scales, tensor_scale)
    with pytest.raises(ValueError, match=r"expected scales \[out, in / 32\] = \[5, 4\], uint8"):
        gemm_fp4(x, packed, scales)
    with pytest.raises(ValueError, match=r"expected scales \[out, in / 16\] = \[5, 8\], uint8"):
        gemm_fp4(x, packed, scales.view(FP8), tensor_scale)
    assert gemm_fp4(x[:0], packed, scales, tensor_scale).shape == (0, 5)


def test_every_gpu_has_tiles_for_all_of_them() -> None:
    for gpu in ARCHITECTURES.values():
        for tokens in (1, 17, 65, 5000):
            for tiles in (W8_TILES, BLOCK_TILES, FP4_TILES):
                assert choose(tiles, tokens, 4096, gpu).fits(gpu)


@pytest.mark.parametrize(
    ("name", "unit"), [("gemm_w8a8", "IGMMA"), ("gemm_fp8_blocks", "QGMMA"), ("gemm_fp4", "HGMMA")]
)
def test_on_hopper_they_use_the_matrix_instructions_of_their_format(name, unit) -> None:
    """4-bit floats those of 16 bits: there, too, they are emulated."""
    entries = [e for line, e in json.loads(TABLE.read_text()).items() if line.endswith(f": {name}, sm_90")]
    assert len(entries) == 4
    assert all(set(entry["matrix_instructions"]) == {unit} for entry in entries)
