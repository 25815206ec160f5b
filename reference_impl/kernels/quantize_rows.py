"""Activations in 8 bits for a product: int8 or e4m3 with a scale per token, e4m3 with one per token and 128 inputs.

They are rounded as the checkpoints' own formats prescribe (compressed-tensors, DeepSeek-V3): the largest magnitude of
what shares a scale becomes 127.5 in int8, whose codes end at 127, and 448 in e4m3. A row is read twice where its scale
is needed first, the second time from the cache. Bytes per row: 2 in read, in + 4 written (in + in / 32 with groups).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.eight_bits import encoded, magnitude, scale_of, scale_to
from reference_impl.kernels.launch import launch
from reference_impl.kernels.reference.linear import GROUP


@triton.jit
def _quantize_rows_int8(
    x, codes, scale, in_features, stride_x,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, in_features, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + token * stride_x + i, mask=i < in_features, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(value))
    row_scale = scale_to(tl.max(largest, 0), 127.5)
    tl.store(scale + token, row_scale)
    for start in range(0, in_features, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + token * stride_x + i, mask=i < in_features, other=0.0).to(tl.float32)
        nearest = (tl.div_rn(value, row_scale) + 12582912.0) - 12582912.0  # ties to the even one: 127.5 becomes 128
        nearest = tl.minimum(tl.maximum(nearest, -128.0), 127.0)
        tl.store(codes + token * in_features + i, nearest.to(tl.int8), mask=i < in_features)


@triton.jit
def _quantize_rows_fp8(
    x, codes, scale, in_features, stride_x,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    fp8: tl.constexpr = codes.dtype.element_ty
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, in_features, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + token * stride_x + i, mask=i < in_features, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(value))
    row_scale = scale_of(tl.max(largest, 0), fp8)
    inverse = tl.div_rn(1.0, row_scale)
    tl.store(scale + token, row_scale)
    for start in range(0, in_features, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + token * stride_x + i, mask=i < in_features, other=0.0).to(tl.float32)
        tl.store(codes + token * in_features + i, encoded(value * inverse, fp8), mask=i < in_features)


@triton.jit
def _quantize_groups_fp8(
    x, codes, scale, in_features, num_groups, stride_x,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    fp8: tl.constexpr = codes.dtype.element_ty
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + token * stride_x + i, mask=i < in_features, other=0.0).to(tl.float32)
    group_scale = scale_of(tl.max(magnitude(value), 1), fp8)
    tl.store(scale + token * num_groups + group, group_scale, mask=group < num_groups)
    inverse = tl.div_rn(1.0, group_scale)
    tl.store(codes + token * in_features + i, encoded(value * inverse[:, None], fp8), mask=i < in_features)


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `reference.quantize_rows_int8`, which documents shapes and meanings."""
    return _by_rows(_quantize_rows_int8, x, torch.int8)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `reference.quantize_rows_fp8`, which documents shapes and meanings."""
    return _by_rows(_quantize_rows_fp8, x, torch.float8_e4m3fn)


def _by_rows(kernel: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _check_rows(x)
    num_tokens, in_features = x.shape
    codes, scale = x.new_empty(x.shape, dtype=dtype), x.new_empty(num_tokens, dtype=torch.float32)
    if num_tokens:
        launch(
            kernel, (num_tokens,), x, codes, scale, in_features, x.stride(0),
            BLOCK=min(4096, triton.next_power_of_2(in_features)),
            options={"num_warps": 4},
        )  # fmt: skip
    return codes, scale


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `reference.quantize_groups_fp8`, which documents shapes and meanings."""
    (num_tokens, in_features), num_groups = x.shape, -(-x.shape[1] // GROUP)
    _check_rows(x)
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((num_tokens, num_groups), dtype=torch.float32)
    if num_tokens:
        groups = min(16, triton.next_power_of_2(num_groups))
        launch(
            _quantize_groups_fp8, (num_tokens, -(-num_groups // groups)),
            x, codes, scale, in_features, num_groups, x.stride(0),
            GROUPS=groups, GROUP=GROUP, options={"num_warps": 4},
        )  # fmt: skip
    return codes, scale


def _check_rows(x: Tensor) -> None:
    if len(x) and x.stride(1) != 1:
        raise ValueError(f"expected rows that are contiguous, got strides {x.stride()}")
