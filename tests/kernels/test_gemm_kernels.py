"""Products of linear layers, 16 bits and FP8, against their twins and float64, in the interpreter or on a GPU."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.gemm import TILES, Tile, choose, gemm, grid_of
from reference_impl.kernels.gemm_fp8 import PROMOTED, gemm_fp8
from reference_impl.kernels.gemm_fp8 import TILES as FP8_TILES
from reference_impl.kernels.launch import TICKETS, tickets_of
from reference_impl.kernels.quantize_rows import quantize_rows_fp8
from tests.kernels.compile_table import TABLE
from tests.kernels.paged import DEVICE, check

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
FP8 = torch.float8_e4m3fn
# tokens, in, out: ones, no powers of two, around tiles, few and many tokens; in long enough for splits
SHAPES = [(1, 1, 1), (1, 1032, 3), (3, 2048, 65), (17, 100, 64), (33, 129, 70), (65, 64, 129), (130, 72, 257)]


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def inside_nan(x: Tensor) -> Tensor:
    """The same numbers as a part of a larger tensor whose other elements are NaN."""
    room = torch.full((len(x) + 1, x.shape[1] + 16), torch.nan, device=x.device).to(x.dtype)
    room[: len(x), : x.shape[1]] = x
    return room[: len(x), : x.shape[1]]


# The shapes are of the addresses and the splits, which no dtype changes: float32 has one with splits and one without.
SHAPES_AND_DTYPES = [
    pytest.param(*shape, dtype, marks=pytest.mark.slow if dtype is torch.float32 and n not in (2, 5) else [])
    for dtype in DTYPES
    for n, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("tokens", "inputs", "outputs", "dtype"), SHAPES_AND_DTYPES)
def test_gemm_of_ragged_shapes_that_lie_between_nan(tokens, inputs, outputs, dtype) -> None:
    x, weight = (
        inside_nan(normal(tokens, inputs, dtype=dtype)),
        inside_nan(normal(outputs, inputs, dtype=dtype, seed=1)),
    )
    check(gemm, reference.gemm, (x, weight))
    check(gemm, reference.gemm, (x, weight, normal(outputs, dtype=dtype, seed=2)))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gemm_in_every_tile(tile) -> None:
    """Two tiles and a bit each way, and two splits where the tile has them."""
    tokens, outputs, inputs = tile.block_m + 1, tile.block_n + 1, 8 * tile.block_k + 8
    assert (grid_of(tile, tokens, outputs, inputs, ARCHITECTURES["sm_90"])[1] > 1) is tile.may_split
    arguments = normal(tokens, inputs), normal(outputs, inputs, seed=1), normal(outputs, seed=2)
    check(partial(gemm, tile=tile), reference.gemm, arguments)


@pytest.mark.parametrize("tokens", [2, 70])
def test_gemm_of_huge_tiny_and_equal_numbers(tokens) -> None:
    weight = normal(40, 160, dtype=torch.float32, seed=1)
    for x in (1e15 * normal(tokens, 160, dtype=torch.float32), 1e-15 * normal(tokens, 160, dtype=torch.float32)):
        check(gemm, reference.gemm, (x, weight))
    ones = torch.ones(tokens, 160, device=DEVICE, dtype=torch.float16)
    assert torch.equal(gemm(ones, ones), torch.full((tokens, tokens), 160.0, device=DEVICE, dtype=torch.float16))


def test_gemm_of_no_tokens_launches_nothing() -> None:
    assert gemm(normal(0, 32), normal(5, 32)).shape == (0, 5)


def test_an_infinite_token_spoils_only_its_row() -> None:
    x = normal(3, 64)
    x[1, 5] = torch.inf
    y = gemm(x, normal(20, 64, seed=1))
    assert torch.equal(y[[0, 2]], gemm(normal(3, 64), normal(20, 64, seed=1))[[0, 2]])
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("tokens", [1, 20])
def test_splits_add_up_to_the_same_in_every_run_and_leave_no_ticket(tokens) -> None:
    x, weight = normal(tokens, 2048), normal(130, 2048, seed=1)
    tile = choose(TILES, tokens, 130, ARCHITECTURES["sm_90"])
    assert grid_of(tile, tokens, 130, 2048, ARCHITECTURES["sm_90"])[1] == 4
    first = gemm(x, weight)
    assert all(torch.equal(gemm(x, weight), first) for _ in range(2))
    assert tickets_of(first.device).count_nonzero() == 0


def test_operands_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a weight \[out, 32\].* got x \[2, 32\]"):
        gemm(normal(2, 32), normal(5, 31))
    with pytest.raises(ValueError, match="contiguous along their rows"):
        gemm(normal(32, 2).T, normal(5, 32))
    for bias in (normal(4), normal(5, 2)[:, 0]):
        with pytest.raises(ValueError, match=r"expected a bias \[5\], contiguous"):
            gemm(normal(2, 32), normal(5, 32), bias)
    with pytest.raises(ValueError, match="a scale for each of 2 tokens and 5 outputs"):
        gemm_fp8(*quantize_rows_fp8(normal(2, 32)), normal(5, 32).to(FP8), normal(4, dtype=torch.float32))


# Which tile, and how many splits


def test_every_gpu_has_a_tile_for_every_shape() -> None:
    for gpu in ARCHITECTURES.values():
        for tokens in (1, 16, 17, 32, 33, 64, 65, 128, 5000):
            for tiles in (TILES, FP8_TILES):
                tile = choose(tiles, tokens, 4096, gpu)
                assert tile.fits(gpu)
                assert tile.block_m >= min(tokens, 128)


def test_a_tile_knows_what_shared_memory_the_compiler_takes() -> None:
    """Else tiles would be left out that fit, or taken that do not."""
    table = json.loads(TABLE.read_text())
    for gpu in (gpu for gpu in ARCHITECTURES.values() if gpu.has_matrix):
        for name, tiles in (("gemm", TILES), ("gemm_fp8", FP8_TILES)):
            for tile in tiles if name == "gemm" or gpu.has_fp8 else ():
                shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k} in {tile.num_stages} stages"
                entry = table.get(f"{name}, {shape}: {name}, {gpu.name}")
                assert (entry is not None) is tile.fits(gpu)
                assert entry is None or 0 <= entry["shared_bytes"] - tile.shared_bytes(gpu) <= 64  # and barriers


@pytest.mark.parametrize(
    ("name", "unit"), [("gemm", "HGMMA"), ("gemm_fp8", "QGMMA"), ("gemm_w4a16", "HGMMA"), ("gemm_w8a16", "HGMMA")]
)
def test_on_hopper_products_use_its_matrix_instructions(name, unit) -> None:
    """For few tokens, too: W x^T has a side of 64."""
    entries = [e for line, e in json.loads(TABLE.read_text()).items() if line.endswith(f": {name}, sm_90")]
    assert len(entries) >= 6
    assert all(set(entry["matrix_instructions"]) == {unit} for entry in entries)


def test_few_tokens_take_the_narrowest_tile_and_many_the_largest_that_keeps_the_gpu_busy() -> None:
    hopper, ada = ARCHITECTURES["sm_90"], ARCHITECTURES["sm_89"]
    assert [choose(TILES, tokens, 4096, hopper).block_m for tokens in (1, 17, 64, 65)] == [16, 32, 64, 128]
    assert choose(TILES, 4096, 4096, hopper) == Tile(128, 256, 64, 8, 4)
    assert choose(TILES, 4096, 4096, ada) == Tile(128, 128, 64, 8, 4), "it has no registers for 128 x 256"
    assert choose(TILES, 1024, 4096, hopper).block_n == 128
    assert choose(TILES, 128, 4096, hopper).block_n == 64


def test_splits_fill_a_gpu_that_tiles_would_leave_empty() -> None:
    hopper, tile = ARCHITECTURES["sm_90"], Tile(16, 64, 128, 4, 5)
    assert grid_of(tile, 1, 28672, 4096, hopper) == (448, 1)
    assert grid_of(tile, 1, 4096, 4096, hopper) == (64, 4), "256 blocks, two on nearly every multiprocessor"
    assert grid_of(tile, 1, 6144, 4096, hopper) == (96, 4), (
        "two splits would give 60 of 132 twice as much as the others"
    )
    assert grid_of(tile, 1, 64, 512, hopper) == (1, 1), "fewer than four steps to a split"
    assert grid_of(tile, 1, 64, 1024, hopper) == (1, 2)
    assert grid_of(Tile(128, 64, 64, 4, 3), 128, 9000, 4096, hopper) == (141, 1), "arithmetic decides"
    assert grid_of(Tile(128, 64, 64, 4, 3), 128, 2048, 4096, hopper) == (32, 4)
    assert grid_of(Tile(128, 256, 64, 8, 4), 128, 256, 65536, hopper) == (1, 1), "no registers to add splits up"


def test_there_is_a_ticket_for_every_tile_that_is_split() -> None:
    tile, most = Tile(16, 64, 128, 4, 4), 0
    for gpu in ARCHITECTURES.values():
        grids = [grid_of(tile, 1, 64 * tiles, 8192, gpu) for tiles in range(1, 5000, 7)]
        most = max(most, *(tiles for tiles, splits in grids if splits > 1))
    assert 1000 < most < 5000 < TICKETS


# FP8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1, 33, 128, 5000])
def test_codes_of_rows_are_the_nearest(inputs, dtype) -> None:
    x = normal(5, inputs, dtype=dtype) * torch.tensor([1, 1e-4, 0, 300, 1], device=DEVICE, dtype=dtype)[:, None]
    x[4] = 2.5  # all equal
    x[0, -1] = -9  # a row's largest is its last
    codes, scale = quantize_rows_fp8(inside_nan(x))
    expected_codes, expected_scale = reference.quantize_rows_fp8(x)
    assert torch.allclose(scale, expected_scale, rtol=1e-6, atol=0)
    assert torch.equal(codes.float()[2], torch.zeros(inputs, device=DEVICE))
    assert codes.float().abs().amax(1)[[0, 1, 3, 4]].tolist() == [448] * 4
    # A GPU's division may be off by a bit, so that what is nearly a tie falls the other way.
    assert (codes.float() != expected_codes.float()).sum() <= 1 + 0.005 * x.numel()


def test_rows_of_tiny_numbers_divide_by_no_zero() -> None:
    x = torch.tensor([[1e-30, -1e-38], [0.0, 0.0], [1e30, 3e38]], device=DEVICE)
    codes, scale = quantize_rows_fp8(x)
    assert codes.float().isfinite().all()
    assert scale.isfinite().all()
    assert (scale > 0).all()


def fp8_operands(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, ...]:
    codes, scale = reference.quantize_rows_fp8(normal(tokens, inputs) if tokens else normal(0, inputs))
    weight, weight_scale = reference.quantize_rows_fp8(normal(outputs, inputs, seed=1) * 0.02)
    return inside_nan(codes), scale, inside_nan(weight), weight_scale


def lost_on_hopper(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """No element [tokens, out] of the product loses more in Hopper's FP8 unit.

    At a time the unit adds 32 products to a sum, as numbers with 13 bits after the leading one of the largest of them;
    what lies below is cut off, and again of the new sum (DeepSeek-V3 2024, 3.3.2; SageAttention2 2024, 3.2). So with M
    the largest, a number loses less than M / 2^13. A product of two e4m3 has 8 bits: one of M / 64 or more loses none.
    (Here M / 32: the unit's M, of sums that have lost something, is not quite ours.) A sum begins anew after PROMOTED.
    """
    padded = [F.pad(t.double(), (0, -codes.shape[1] % PROMOTED)) for t in (codes, weight)]
    x, w = (t.unflatten(1, (-1, PROMOTED // 32, 32)) for t in padded)
    product = x[:, None] * w  # [tokens, out, sums, steps, 32]
    after = product.sum(-1).cumsum(-1)
    before = after - product.sum(-1)
    largest = torch.stack((product.abs().amax(-1), before.abs(), after.abs())).amax(0)
    unit = largest / 2**13
    cut = torch.where(product.abs() < largest[..., None] / 32, product.abs().minimum(unit[..., None]), 0)
    return (cut.sum(-1) + 2 * unit).sum((2, 3)) * scale.double()[:, None] * weight_scale.double()


def check_fp8(kernel, arguments: tuple[Tensor, ...], out_dtype: torch.dtype) -> None:
    """In 16 bits, rounding hides what a GPU's unit loses; in float32 it shows."""
    shows = DEVICE.type == "cuda" and out_dtype is torch.float32
    check(
        lambda *given: kernel(*given, out_dtype),
        lambda *given: reference.gemm_fp8(*given, torch.float64 if given[1].dtype is torch.float64 else out_dtype),
        arguments,
        lost=lost_on_hopper(*arguments).max().item() if shows else 0.0,
    )


def cut_off(x: Tensor, largest: Tensor) -> Tensor:
    unit = 2.0 ** (largest.log2().floor() - 13)
    return torch.where(unit > 0, (x / unit).trunc() * unit, x)


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES[1:])
def test_what_hopper_loses_is_bounded_and_far_less_than_the_product(tokens, inputs, outputs) -> None:
    """The bound holds for a unit that is computed here step by step, and is not so wide that anything would pass."""
    codes, scale, weight, weight_scale = operands = tuple(t.cpu() for t in fp8_operands(tokens, inputs, outputs))
    x, w, total = codes.double(), weight.double(), torch.zeros(tokens, outputs, dtype=torch.float64)
    for start in range(0, inputs, PROMOTED):
        acc = torch.zeros_like(total)
        for k in range(start, min(start + PROMOTED, inputs), 32):
            terms = torch.cat((x[:, None, k : k + 32] * w[:, k : k + 32], acc[..., None]), 2)
            acc = cut_off(terms, terms.abs().amax(2, keepdim=True)).sum(2)
            acc = cut_off(acc, acc.abs())
        total += acc
    exact = reference.gemm_fp8(codes, scale.double(), weight, weight_scale.double(), torch.float64)
    error, lost = (total * scale[:, None] * weight_scale - exact).abs(), lost_on_hopper(*operands)
    assert (error <= lost).all()
    assert error.max() > 1e-5, "or this unit would lose nothing"
    assert lost.max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize(("tokens", "inputs", "outputs", "out_dtype"), SHAPES_AND_DTYPES)
def test_gemm_fp8_of_ragged_shapes_that_lie_between_nan(tokens, inputs, outputs, out_dtype) -> None:
    check_fp8(gemm_fp8, fp8_operands(tokens, inputs, outputs), out_dtype)


@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
def test_gemm_fp8_in_every_tile(tile) -> None:
    operands = fp8_operands(tile.block_m + 1, 8 * tile.block_k + 16, tile.block_n + 1)
    check_fp8(partial(gemm_fp8, tile=tile), operands, torch.float16)


def test_a_whole_layer_in_fp8_is_near_the_layer() -> None:
    x, weight = normal(9, 512), normal(40, 512, seed=1)
    found = gemm_fp8(*quantize_rows_fp8(x), *quantize_rows_fp8(weight), torch.float16)
    exact = x.double() @ weight.double().T
    assert 0.001 < (found - exact).norm() / exact.norm() < 0.05  # two operands of 3 bits after the leading one
    assert gemm_fp8(*fp8_operands(0, 32, 5), torch.float16).shape == (0, 5)
