"""Linear layers of few tokens with norm, gate and residual: against the twin and float64, interpreted or on a GPU."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.fused_linear import FLOAT32_TILES, TILES, fused_linear
from reference_impl.kernels.gemm import FEW_TOKENS, choose, grid_of
from reference_impl.kernels.launch import tickets_of
from tests.kernels.compile_table import TABLE
from tests.kernels.paged import DEVICE, check
from tests.kernels.test_gemm_kernels import inside_nan, normal

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# tokens, in steps of 32 and more inputs, rows: ones, no powers of two, around tiles, in long enough for splits
SHAPES = [(1, 0.03125, 6), (1, 8.25, 6), (3, 16, 66), (17, 3.125, 64), (33, 4.03125, 70), (64, 2.25, 130)]
# What stands around: a decoder's four products, each alone, all together, nothing.
AROUND: dict[str, dict[str, Any]] = {
    "nothing": {},
    "norm": {"norm": True},
    "gate": {"gate": "silu"},
    "residual": {"residual": True},
    "norm and SwiGLU": {"norm": True, "gate": "silu"},
    "norm and GeGLU, biases": {"norm": True, "gate": "gelu_tanh", "bias": True},
    "all": {"bias": True, "norm": True, "gate": "silu", "residual": True},
}


def operands(
    tokens: int, inputs: int, rows: int, dtype: torch.dtype, bias: bool = False, norm: bool = False,
    gate: str | None = None, residual: bool = False, norm_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """x, weight, bias, norm, residual; what is read by rows lies between NaN."""
    return (
        inside_nan(normal(tokens, inputs, dtype=dtype)),
        inside_nan(normal(rows, inputs, dtype=dtype, seed=1)),
        normal(rows, dtype=dtype, seed=2) if bias else None,
        1 + normal(inputs, dtype=norm_dtype or dtype, seed=3) / 2 if norm else None,
        inside_nan(normal(tokens, rows // 2 if gate else rows, dtype=dtype, seed=4)) if residual else None,
    )


def check_fused(
    given: tuple[Tensor | None, ...], kernel: Any = fused_linear, eps: float = 1e-3, gate: Any = None
) -> None:
    def of(function: Any) -> Any:
        return lambda x, weight, bias, norm, residual: function(
            x, weight, bias, norm=norm, eps=eps, gate=gate, residual=residual
        )

    check(of(kernel), of(reference.fused_linear), given)


# float32 has other tiles, but what stands around is added in float32 in any case.
@pytest.mark.parametrize(
    ("around", "dtype"),
    [
        pytest.param(a, d, marks=[] if d is not torch.float32 or a in ("nothing", "all") else pytest.mark.slow)
        for d in DTYPES
        for a in AROUND
    ],
)
def test_ragged_shapes_that_lie_between_nan(around, dtype) -> None:
    for tokens, steps, rows in SHAPES:
        inputs = int(steps * (32 if dtype is torch.float32 else 128))
        check_fused(operands(tokens, inputs, rows, dtype, **AROUND[around]), gate=AROUND[around].get("gate"))


@pytest.mark.parametrize("tile", [*TILES, *FLOAT32_TILES], ids=str)
def test_every_tile_with_and_without_splits(tile) -> None:
    """Two tiles of rows and a bit; all places for tokens taken, or one."""
    dtype, rows = torch.float32 if tile.x_bytes == 4 else torch.float16, 2 * tile.block_n + 2
    for tokens, steps in ((tile.block_m - 1, 8), (1, 3)):
        inputs = steps * tile.block_k + 8
        assert (grid_of(tile, tokens, rows, inputs, ARCHITECTURES["sm_90"])[1] > 1) is (steps == 8)
        for around in ("all", "norm"):
            check_fused(
                operands(tokens, inputs, rows, dtype, **AROUND[around]),
                partial(fused_linear, tile=tile),
                gate=AROUND[around].get("gate"),
            )


def test_a_norm_of_float32_beside_16_bits() -> None:
    """Gemma's, 1 + w."""
    for inputs in (100, 2048):
        check_fused(operands(3, inputs, 40, torch.float16, norm=True, norm_dtype=torch.float32))


@pytest.mark.parametrize("size", [1e-18, 1e-4, 1e15])
def test_rows_of_any_size_come_to_one_size(size) -> None:
    x, *others = operands(3, 300, 40, torch.float32, norm=True)
    assert x is not None
    for eps in (1e-30, 1e-5):
        check_fused((x * size, *others), eps=eps)
    zero = fused_linear(x * 0, others[0], norm=others[2], eps=1e-6)
    assert torch.equal(zero, torch.zeros_like(zero))


def test_equal_numbers_add_up_exactly() -> None:
    ones = torch.ones(5, 160, device=DEVICE, dtype=torch.float16)
    y = fused_linear(ones, torch.ones(6, 160, device=DEVICE, dtype=torch.float16), residual=ones[:, :6])
    assert torch.equal(y, torch.full((5, 6), 161.0, device=DEVICE, dtype=torch.float16))


def test_gate_and_up_are_halves_of_the_rows() -> None:
    """Row i of the first half goes with row i of the second: 70 of them, more than a tile's half."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=DEVICE)
    gate, up = torch.full((70, 1), 50.0, device=DEVICE), torch.arange(70.0, device=DEVICE)[:, None]
    weight = torch.cat((gate.expand(-1, 2), torch.cat((up, 2 * up), 1)))
    expected = 50 * torch.stack((up[:, 0], 2 * up[:, 0]))  # silu(50) is 50
    assert torch.equal(fused_linear(x, weight, gate="silu"), expected)


@pytest.mark.parametrize("inputs", [64, 2048])
def test_an_infinite_token_spoils_only_its_row(inputs) -> None:
    x, weight, _, norm, residual = operands(3, inputs, 20, torch.float16, norm=True, residual=True)
    good = fused_linear(x, weight, norm=norm, eps=1e-5, residual=residual)
    x[1, 5] = torch.inf
    found = fused_linear(x, weight, norm=norm, eps=1e-5, residual=residual)
    assert torch.equal(found[[0, 2]], good[[0, 2]])
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("around", ["norm", "all"])
def test_splits_add_up_to_the_same_in_every_run_and_leave_no_ticket(around) -> None:
    options = AROUND[around]
    given = operands(20, 2048, 130, torch.float16, **options)
    tile = choose(TILES, 20, 130, ARCHITECTURES["sm_90"])
    assert grid_of(tile, 20, 130, 2048, ARCHITECTURES["sm_90"])[1] == 4

    def run() -> Tensor:
        x, weight, bias, norm, residual = given
        return fused_linear(x, weight, bias, norm=norm, eps=1e-5, gate=options.get("gate"), residual=residual)

    first = run()
    assert all(torch.equal(run(), first) for _ in range(2))
    assert tickets_of(first.device).count_nonzero() == 0


def test_no_tokens_launch_nothing() -> None:
    assert fused_linear(normal(0, 32), normal(6, 32), gate="silu").shape == (0, 3)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = normal(2, 32), normal(6, 32)
    with pytest.raises(ValueError, match=r"a weight \[out, 32\]"):
        fused_linear(x, normal(6, 31))
    with pytest.raises(ValueError, match=r"expected at most 64 tokens .* got 65"):
        fused_linear(normal(FEW_TOKENS + 1, 32), weight)
    with pytest.raises(ValueError, match=r"expected a norm \[32\], contiguous, got \[31\]"):
        fused_linear(x, weight, norm=normal(31))
    with pytest.raises(ValueError, match="an even number of rows with one, got 'silu' and 5 rows"):
        fused_linear(x, weight[:5], gate="silu")
    with pytest.raises(ValueError, match="got 'relu'"):
        fused_linear(x, weight, gate="relu")  # type: ignore[arg-type]
    for residual in (normal(2, 5), normal(6, 2).T, normal(2, 6, dtype=torch.float32)):
        with pytest.raises(ValueError, match=r"expected a residual \[2, 6\] of torch.float16"):
            fused_linear(x, weight, residual=residual)


# The twin


def test_the_twin_is_the_chain_of_the_operations_alone() -> None:
    x, weight, bias, norm, residual = (
        None if t is None else t.double() for t in operands(5, 40, 12, torch.float32, **AROUND["all"])
    )
    h = reference.gemm(reference.rms_norm(x, norm, 1e-3), weight, bias)
    for gate, function in (("silu", reference.silu_and_mul), ("gelu_tanh", reference.gelu_tanh_and_mul)):
        found = reference.fused_linear(x, weight, bias, norm=norm, eps=1e-3, gate=gate, residual=residual)
        assert torch.allclose(found, residual + function(h), rtol=1e-13, atol=1e-13)


def test_in_bfloat16_one_kernel_rounds_less_than_a_chain_of_them() -> None:
    """What the chain writes between its kernels is rounded: norm, gate and up, what is added."""
    x, weight, bias, norm, residual = operands(16, 256, 128, torch.bfloat16, **AROUND["all"])
    exact, one = (
        reference.fused_linear(*(t.to(dtype) for t in (x, weight, bias)), norm=norm.to(dtype), eps=1e-5, gate="silu",
                               residual=residual.to(dtype)).double()
        for dtype in (torch.float64, torch.bfloat16)
    )  # fmt: skip
    chain = residual + reference.silu_and_mul(reference.gemm(reference.rms_norm(x, norm, 1e-5), weight, bias))
    assert (one - exact).square().mean() < (chain.double() - exact).square().mean()


# Tiles


def test_every_gpu_has_a_tile_that_holds_all_tokens() -> None:
    for gpu in ARCHITECTURES.values():
        for tiles in (TILES, FLOAT32_TILES):
            for tokens in (1, 16, 17, 32, 33, 64):
                tile = choose(tiles, tokens, 4096, gpu)
                assert tile.fits(gpu)
                assert tokens <= tile.block_m < max(32, 2 * tokens)


def test_every_tile_that_fits_is_compiled_and_on_hopper_uses_its_matrix_instructions() -> None:
    table = {
        line: entry
        for line, entry in json.loads(TABLE.read_text()).items()
        if ": fused_linear, " in line and "weight of" not in line
    }
    for gpu in (gpu for gpu in ARCHITECTURES.values() if gpu.has_matrix):
        for tile in TILES:
            shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k} in {tile.num_stages} stages"
            entries = [e for line, e in table.items() if f", {shape}: " in line and line.endswith(f", {gpu.name}")]
            assert len(entries) == 4 * tile.fits(gpu)
            assert gpu.name != "sm_90" or all(set(entry["matrix_instructions"]) == {"HGMMA"} for entry in entries)
