"""Products of other people's formats for the kernel bench: int8 and FP8 on both sides, weights of 4-bit floats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference_impl.bench.kernel_products import PROVEN, cublas, sizes
from reference_impl.bench.kernel_work import Place, Work, bytes_of
from reference_impl.kernels import reference
from reference_impl.kernels.reference.linear import FP4_STEP, GROUP


def _result(place: Place, cast: Callable[[Tensor], Tensor], scale: Tensor) -> torch.dtype:
    return place.dtype if cast(scale).dtype is torch.float32 else torch.float64


def int8_both(place: Place, tokens: int, in_features: int, out_features: int) -> Work:
    """With the rounding of the tokens, a launch of its own; cuBLAS in 16 bits gets the numbers that codes stand for."""
    from reference_impl.kernels.gemm_w8a8 import gemm_w8a8
    from reference_impl.kernels.quantize_rows import quantize_rows_int8

    tokens, in_features, out_features = sizes(place, tokens, in_features, out_features)
    x = place.randn(tokens, in_features)
    codes, scale = reference.quantize_rows_int8(x)
    weight, weight_scale = reference.quantize_rows_int8(place.randn(out_features, in_features))
    return Work(
        ours=lambda: gemm_w8a8(*quantize_rows_int8(x), weight, weight_scale, place.dtype),
        expected=lambda cast: reference.gemm_w8a8(
            codes, cast(scale), weight[:PROVEN], cast(weight_scale[:PROVEN]), _result(place, cast, scale)
        ),
        part=lambda y: y[:, :PROVEN],
        moved=bytes_of(x, weight, weight_scale) + tokens * out_features * place.dtype.itemsize,
        flops=2.0 * tokens * in_features * out_features,
        cold=tokens <= 64,
        peers={"cuBLAS": cublas(x, lambda: (weight.float() * weight_scale[:, None]).to(place.dtype))},
    )


def fp8_blocks(place: Place, tokens: int, in_features: int, out_features: int) -> Work:
    """With the rounding of the tokens by groups of 128 inputs, a launch of its own."""
    from reference_impl.kernels.gemm_fp8_blocks import gemm_fp8_blocks
    from reference_impl.kernels.quantize_rows import quantize_groups_fp8

    tokens, in_features, out_features = sizes(place, tokens, in_features, out_features)
    x = place.randn(tokens, in_features)
    codes, scale = reference.quantize_groups_fp8(x)
    weight = place.randn(out_features, in_features).to(torch.float8_e4m3fn)
    blocks = place.randn(-(-out_features // GROUP), -(-in_features // GROUP)).abs().float() + 0.5

    def plain() -> Tensor:
        spread = blocks.repeat_interleave(GROUP, 0)[:out_features].repeat_interleave(GROUP, 1)[:, :in_features]
        return (weight.float() * spread).to(place.dtype)

    return Work(
        ours=lambda: gemm_fp8_blocks(*quantize_groups_fp8(x), weight, blocks, place.dtype),
        expected=lambda cast: reference.gemm_fp8_blocks(
            codes, cast(scale), weight[:PROVEN], cast(blocks[:1]), _result(place, cast, scale)
        ),
        part=lambda y: y[:, :PROVEN],
        moved=bytes_of(x, weight, blocks) + tokens * out_features * place.dtype.itemsize,
        flops=2.0 * tokens * in_features * out_features,
        precision="fp8",
        cold=tokens <= 64,
        peers={"cuBLAS": cublas(x, plain)},
    )


def fp4(place: Place, tokens: int, in_features: int, out_features: int) -> Work:
    """NVFP4, multiplied in 16 bits."""
    from reference_impl.kernels.gemm_fp4 import gemm_fp4

    tokens, in_features, out_features = sizes(place, tokens, in_features, out_features)
    x = place.randn(tokens, in_features)
    codes = torch.randint(16, (out_features, in_features), dtype=torch.uint8, device=place.device)
    packed = reference.pack_int4(codes, FP4_STEP)
    given = place.randn(out_features, in_features // 16).abs().float() + 0.5
    scales = given.to(torch.float8_e4m3fn).view(torch.uint8)
    tensor_scale = torch.full((out_features,), in_features**-0.5 / 8, device=place.device)

    def plain() -> Tensor:
        one_by_one = torch.eye(in_features, device=place.device)
        return reference.gemm_fp4(one_by_one, packed, scales, tensor_scale).T.to(x.dtype)

    return Work(
        ours=lambda: gemm_fp4(x, packed, scales, tensor_scale),
        expected=lambda cast: reference.gemm_fp4(cast(x), packed[:PROVEN], scales[:PROVEN], tensor_scale[:PROVEN]),
        part=lambda y: y[:, :PROVEN],
        moved=bytes_of(x, packed, scales, tensor_scale) + tokens * out_features * x.element_size(),
        flops=2.0 * tokens * in_features * out_features,
        cold=tokens <= 64,
        peers={"cuBLAS": cublas(x, plain)},
    )
