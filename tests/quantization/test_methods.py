"""Quantized linear layers: what they multiply is what the codes say, in every shape, from pieces, with a bias.

The errors allowed follow from the arithmetic: x, a weight and a result may each be rounded to the 16-bit dtype once
(relative error u = eps / 2), and sums are float32 (in x 2^-24 of the sum of magnitudes).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.linear_methods import choose_method
from reference_impl.core.linear import Linear
from reference_impl.features.fusion.kernels import TORCH, choose_kernels
from reference_impl.interfaces import LinearMethod
from reference_impl.kernels import reference
from reference_impl.kernels.gemm import FEW_TOKENS
from reference_impl.models.quantization.cpu import CpuInt4, CpuInt8
from reference_impl.models.quantization.methods import Fp8, Int4, Int8
from tests.kernels.paged import DEVICE

CPU = torch.device("cpu")
PARTS = {"q_proj": 48, "k_proj": 16, "v_proj": 24}  # together no multiple of 16
ROWS = (0, 1, 2, 7, 8, 33)


def normal(*shape: int, seed: int, device: torch.device = CPU) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def loaded(
    method: LinearMethod, in_features: int, parts: dict[str, int], bias: bool
) -> tuple[Linear, Tensor, Tensor | None]:
    """A layer filled piece by piece, the last piece first; its weight as it came, and its bias."""
    linear = Linear(method, in_features, parts, bias)
    weight = normal(linear.out_features, in_features, seed=1).bfloat16()
    offsets = normal(linear.out_features, seed=2).bfloat16() if bias else None
    for part in reversed(parts):
        rows = slice(linear.row_of(part), linear.row_of(part) + parts[part])
        method.load(linear.params, "weight", weight[rows], rows.start)
        if offsets is not None:
            method.load(linear.params, "bias", offsets[rows], rows.start)
    return linear, weight, offsets


def meant(method: LinearMethod, params: dict[str, Tensor]) -> Tensor:
    """The weight [out, in] float64 that codes and scales stand for, before finish()."""
    codes, scales = params["weight"], params["scales"].double()
    if isinstance(method, Int4):
        group_size = 2 * codes.shape[1] // len(scales)
        return (reference.unpack_int4(codes, group_size).double() - 8) * scales.T.repeat_interleave(group_size, 1)
    return codes.double() * (scales[0] if isinstance(method, Int8) else scales)[:, None]


def check_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """found against x weight^T + bias, rounded as said above; dtype: of the arithmetic."""
    u = torch.finfo(dtype).eps / 2
    exact = x.double() @ weight.T
    magnitudes = x.double().abs() @ weight.T.abs()
    allowed = magnitudes * (2 * u + x.shape[1] * 2.0**-24) + exact.abs() * u
    if bias is not None:
        exact = exact + bias.to(exact)
        allowed = allowed + exact.abs() * u
    assert found.shape == exact.shape
    assert found.dtype is x.dtype
    error = (found.double() - exact).abs()
    # Two roundings in a row may add a little of the second order, and a product below the dtype's range is lost.
    assert bool((error <= allowed * (1 + 4 * u) + torch.finfo(dtype).tiny).all()), float((error - allowed).max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("method", "in_features"),
    [(CpuInt4, 32), (CpuInt4, 192), (CpuInt4, 256), (CpuInt8, 17), (CpuInt8, 24), (CpuInt8, 16), (CpuInt8, 208)],
)
def test_on_a_cpu(
    method: Callable[[torch.dtype], Int4 | Int8], in_features: int, dtype: torch.dtype, bias: bool
) -> None:
    made = method(dtype)
    wide = isinstance(made, CpuInt8) and dtype.itemsize > 2  # computed in what was asked for
    for parts in (PARTS, {"o_proj": 32}, {"down_proj": 1}):
        linear, _, offsets = loaded(made, in_features, parts, bias)
        stored = meant(made, linear.params)
        made.finish(linear.params)
        for rows in ROWS:
            x = normal(rows, in_features, seed=3).to(dtype)
            check_product(linear(x), x, stored, offsets, dtype if wide else torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_int8_of_a_cpu_is_computed_in_the_models_dtype_or_by_name_in_bfloat16(dtype: torch.dtype) -> None:
    """A row's product has the digits of the dtype whatever rows are beside it, also of a weight converted in parts; by
    name it has bfloat16's."""
    x = normal(64, 1024, seed=3).to(dtype)
    digits = {}
    for by_name in (False, True):
        made = CpuInt8(dtype, in_bfloat16=by_name)
        linear, _, _ = loaded(made, 1024, {"o_proj": 4100}, bias=False)
        exact = x.double() @ meant(made, linear.params).T
        made.finish(linear.params)
        found = [linear(x), torch.cat([linear(x[:1]), linear(x[1:])])]
        assert all(y.dtype is dtype for y in found)
        digits[by_name] = max(float((y.double() - exact).norm() / exact.norm()) for y in found)
    assert digits[False] < 16 * torch.finfo(dtype).eps
    assert 2.0**-10 < digits[True] < 2.0**-7


def test_rows_that_do_not_lie_side_by_side() -> None:
    for made in (CpuInt4(torch.bfloat16), CpuInt8(torch.bfloat16)):
        linear, _, _ = loaded(made, 64, PARTS, bias=True)
        made.finish(linear.params)
        wide = normal(3, 200, seed=3).bfloat16()
        assert torch.equal(linear(wide[:, 40:104]), linear(wide[:, 40:104].contiguous()))


def test_a_row_does_not_feel_its_neighbours_scale() -> None:
    """FP8 activations have a scale per token: a huge neighbour costs nobody precision."""
    made = Fp8(torch.float32, CPU, reference.quantize_rows_fp8, reference.gemm_fp8)
    linear, _, _ = loaded(made, 64, PARTS, bias=False)
    x = normal(2, 64, seed=3)
    alone = linear(x[:1])
    x[1] *= 1e6
    assert torch.equal(linear(x)[:1], alone)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("quantization", "in_features"), [("int4", 96), ("int4", 256), ("int8", 40), ("fp8", 40)])
def test_triton_computes_what_its_twin_does(quantization: str, in_features: int, bias: bool) -> None:
    dtype = torch.float16
    triton = choose_method(quantization, dtype, DEVICE, choose_kernels("triton", DEVICE, dtype))
    twin = {
        "int4": lambda: Int4(dtype, DEVICE, reference.gemm_w4a16),
        "int8": lambda: Int8(dtype, DEVICE, reference.gemm_w8a16),
        "fp8": lambda: Fp8(dtype, DEVICE, reference.quantize_rows_fp8, reference.gemm_fp8),
    }[quantization]()
    ours, _, offsets = loaded(triton, in_features, PARTS, bias)
    theirs, _, _ = loaded(twin, in_features, PARTS, bias)
    assert {name: t.shape for name, t in ours.params.items()} == {name: t.shape for name, t in theirs.params.items()}
    stored = meant(twin, theirs.params)
    for method, linear in ((triton, ours), (twin, theirs)):
        assert torch.equal(meant(method, linear.params), stored)
        method.finish(linear.params)
    for rows in (0, 1, 5, FEW_TOKENS, FEW_TOKENS + 1):
        x = normal(rows, in_features, seed=3, device=DEVICE).to(dtype)
        codes, scale = reference.quantize_rows_fp8(x)
        rounded = (codes.double() * scale.double()[:, None]).float()
        for linear in (ours, theirs):
            if quantization == "fp8" and (linear is theirs or rows > FEW_TOKENS):
                check_product(linear(x).float(), rounded, stored, offsets, dtype)
            else:
                check_product(linear(x), x, stored, offsets, dtype)


def test_the_weight_takes_the_bytes_it_says() -> None:
    sizes = {}
    for quantization in ("none", "int8", "int4", "fp8"):
        method = choose_method(quantization, torch.bfloat16, CPU, TORCH)
        linear, _, _ = loaded(method, 256, {"gate_proj": 64, "up_proj": 64}, bias=True)
        method.finish(linear.params)
        sizes[quantization] = linear.weight_bytes()
        assert linear.num_parameters() == 128 * 257
    codes, bias, scales = 128 * 256, 2 * 128, 2 * 128
    assert sizes == {
        "none": 2 * codes + bias,
        "int8": codes + bias + scales,
        "int4": codes // 2 + bias + 2 * (256 // 128) * scales,  # scale and zero of each group
        "fp8": codes + bias + 4 * 128,
    }


def test_a_weight_is_rounded_when_it_arrives() -> None:
    """Not kept in 16 bits until the whole model is read."""
    for quantization, bits in (("int4", 4), ("int8", 8), ("fp8", 8)):
        for kernels in (TORCH, choose_kernels("triton", DEVICE, torch.float16)):
            device = CPU if kernels is TORCH else DEVICE
            method = choose_method(quantization, torch.float16, device, kernels)
            linear, _, _ = loaded(method, 256, PARTS, bias=False)
            assert linear.params["weight"].nbytes == 88 * 256 * bits // 8
            assert all(t.device.type == device.type for t in linear.params.values())


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="expected one of none, fp8, int8, int4, got 'int2'"):
        choose_method("int2", torch.bfloat16, CPU, TORCH)
    with pytest.raises(ValueError, match="a multiple of 32, got one with 48: use quantization='int8'"):
        Linear(CpuInt4(torch.bfloat16), 48, PARTS)
    with pytest.raises(ValueError, match="expected a model in float16 or bfloat16, got torch.float32: pass dtype="):
        choose_method("int4", torch.float32, DEVICE, choose_kernels("triton", DEVICE, torch.float32))


def test_a_gpu_without_8_bit_floats_is_refused() -> None:
    from reference_impl.kernels.architectures import ARCHITECTURES
    from reference_impl.kernels.launch import recording

    kernels = choose_kernels("triton", DEVICE, torch.float16)
    with recording(ARCHITECTURES["sm_80"]):
        assert isinstance(choose_method("int8", torch.float16, DEVICE, kernels), Int8)
        with pytest.raises(ValueError, match="multiplies 8-bit floats .* got sm_80: use quantization='int8'"):
            choose_method("fp8", torch.float16, DEVICE, kernels)


def test_which_product_a_cpu_gets() -> None:
    assert type(choose_method("int4", torch.float32, CPU, TORCH)) is CpuInt4
    assert type(choose_method("int8", torch.bfloat16, CPU, TORCH)) is CpuInt8
    assert type(choose_method("fp8", torch.bfloat16, CPU, TORCH)) is Fp8
    cuda = torch.device("cuda")  # without Triton, a T4: the twins
    assert type(choose_method("int4", torch.float16, cuda, TORCH)) is Int4
    assert type(choose_method("int8", torch.float16, cuda, TORCH)) is Int8
