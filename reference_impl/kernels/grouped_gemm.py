"""Rows times the weights of the expert that each row was sent to: a mixture of experts' matrix products in one launch.

Rows are sorted by expert. A program owns BLOCK_M rows of one expert and BLOCK_N of its outputs; it finds its expert on
the device, from expert_offsets, so that the host never waits and a CUDA graph is valid for any routing. Expert e's
tiles begin at e + expert_offsets[e] // BLOCK_M: the grid is bounded by tokens / BLOCK_M + experts, and a program
without rows returns at once (grouped GEMM as in MegaBlocks, Gale et al. 2022; the mapping is that of our flash
attention). GROUP_M tiles of rows share each tile of weights before the next is read, so both come from the L2.

FLOPs: 2 x tokens x in x out. Bytes: the weights of each expert that has rows once, and (in + out) values per token.
With few rows per expert (decoding) the weights' bytes decide: the tile then has 16 rows, and everything lies
transposed, outputs along the first axis, so that the few rows are the small side of the matrix instruction (N = 16).
With many, the FLOPs decide. BLOCK_M does not change the order in which a row is summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.launch import architecture, launch

GROUP_M = 8  # tiles of rows


@triton.jit
def _grouped_gemm(
    x, weights, expert_offsets, out,
    in_features, out_features,
    stride_x, stride_expert, stride_out_feature, stride_in_feature, stride_out,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_n, tiles_m = tl.num_programs(0), tl.num_programs(1)
    tile, tile_n = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    e_range = tl.arange(0, BLOCK_E)
    offsets = tl.load(expert_offsets + e_range, mask=e_range < NUM_EXPERTS, other=2**31 - 1)
    expert = tl.sum((offsets // BLOCK_M + e_range <= tile).to(tl.int32)) - 1  # the last that begins no later
    start, end = tl.load(expert_offsets + expert), tl.load(expert_offsets + expert + 1)
    start += (tile - (start // BLOCK_M + expert)) * BLOCK_M
    if start >= end:
        return

    row = start + tl.arange(0, BLOCK_M)
    feature = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k_range = tl.arange(0, BLOCK_K)
    in_expert, in_out = row < end, feature < out_features
    at_x = x + row.to(tl.int64)[None, :] * stride_x + k_range[:, None]
    at_weight = weights + expert.to(tl.int64) * stride_expert
    at_weight += feature.to(tl.int64)[:, None] * stride_out_feature + k_range[None, :] * stride_in_feature
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, in_features, BLOCK_K):
        in_k = k_range < in_features - k
        weight = tl.load(at_weight, mask=in_out[:, None] & in_k[None, :], other=0.0)
        rows = tl.load(at_x, mask=in_k[:, None] & in_expert[None, :], other=0.0)
        acc = tl.dot(weight, rows, acc, input_precision=PRECISION)
        at_weight += BLOCK_K * stride_in_feature
        at_x += BLOCK_K
    at_out = out + row.to(tl.int64)[None, :] * stride_out + feature[:, None]
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=in_out[:, None] & in_expert[None, :])


def grouped_gemm(x: Tensor, weights: Tensor, expert_offsets: Tensor) -> Tensor:
    """Twin of `reference.grouped_gemm`, which documents shapes and meanings."""
    num_tokens, in_features = x.shape
    num_experts, out_features, _ = weights.shape
    if x.stride(1) != 1 or weights.shape[2] != in_features:
        raise ValueError(
            f"expected x [tokens, in] with `in` contiguous and weights [experts, out, in], "
            f"got shapes {list(x.shape)} and {list(weights.shape)}, strides {x.stride()} of x"
        )
    out = x.new_empty(num_tokens, out_features)
    tile, options = tile_of(num_tokens / num_experts, x.element_size(), architecture())
    launch(
        _grouped_gemm,
        (-(-out_features // tile["BLOCK_N"]), num_tokens // tile["BLOCK_M"] + num_experts),
        x, weights, expert_offsets, out, in_features, out_features, x.stride(0), *weights.stride(), out.stride(0),
        NUM_EXPERTS=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), GROUP_M=GROUP_M,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32", options=options, **tile,
    )  # fmt: skip
    return out


def tile_of(rows_per_expert: float, element_size: int, gpu: Architecture) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options, of three sizes by the mean number of rows: graphs of a few batch sizes need few kernels."""
    if element_size == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32}, {"num_warps": 4, "num_stages": 1}
    if rows_per_expert <= 16:
        block_m, block_n, warps, stages = 16, 64, 4, 4
    elif rows_per_expert <= 64:
        block_m, block_n, warps, stages = 64, 128, 4, 3
    else:
        block_m, block_n, warps, stages = 128, 128, 8, 3
    stages = min(stages, gpu.shared_bytes // ((block_m + block_n) * 64 * element_size))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64}, {"num_warps": warps, "num_stages": stages}
