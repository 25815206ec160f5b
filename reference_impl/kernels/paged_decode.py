"""Attention of one query per row over the paged cache: decoding.

One query reads the whole context, 2 x head_dim values per key and KV head for 4 x head_dim x (heads of the group)
FLOPs: memory decides. So (1) the query heads of a group share one read of the keys: they stand where FlashAttention has
several queries; (2) a long context is cut into splits of SPLIT keys, each a program of its own (Flash-Decoding, Dao et
al. 2023), so that one row fills the GPU, too; a second kernel merges them.

Split s gives the weighted mean o_s of its values and lse_s = log2 of the sum of 2^score. The whole is
sum_s 2^(lse_s - m) o_s / sum_s 2^(lse_s - m), with m the largest lse: no power overflows.

SPLIT is a constant and splits are counted from a row's own context: a row's result does not depend on its neighbours.
Bytes per row: 2 x context x kv_heads x head_dim values are read. A split writes heads x (head_dim + 1) x 4 bytes more,
under 1 % of its reads at SPLIT 512 and four heads in a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.flash_attention import soft_capped
from reference_impl.kernels.launch import architecture, launch

SPLIT = 512  # keys


@triton.jit(do_not_specialize=["stride_table"])
def _paged_decode(
    q, keys, values, out, partial, partial_lse,
    block_table, seq_lens, key_scale, value_scale,
    scale, softcap,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    stride_block, stride_slot, stride_head,
    stride_scale_block, stride_scale_slot, stride_scale_head,
    stride_table,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    context = _first_key(seq_len, WINDOW, BLOCK_N)  # where the row's context begins
    start = context + split * SPLIT
    end = tl.minimum(start + SPLIT, seq_len)
    if start >= seq_len:
        return  # an empty split: the merge does not ask for it

    h_range, d_range = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    in_group, in_head = h_range < GROUP, d_range < HEAD_DIM
    head = kv_head * GROUP + h_range
    at_q = q + row * stride_q_row + head[None, :] * stride_q_head + d_range[:, None]
    query = tl.load(at_q, mask=in_group[None, :] & in_head[:, None], other=0.0)  # [D, H]

    # Everything lies transposed, keys along the first axis: so the few heads are the small side of the matrix
    # instruction (N = 16), and the keys its large one (M = 64).
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
    for n in range(start, end, BLOCK_N):
        key_pos = n + tl.arange(0, BLOCK_N)
        visible = key_pos < end
        if WINDOW:
            visible &= key_pos >= seq_len - WINDOW
        block = tl.load(block_table + row * stride_table + key_pos // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        offset = key_pos % BLOCK_SIZE
        at = (block * stride_block + offset * stride_slot + kv_head * stride_head)[:, None] + d_range[None, :]
        key = tl.load(keys + at, mask=visible[:, None] & in_head[None, :], other=0.0)  # [N, D]
        value = tl.load(values + at, mask=visible[:, None] & in_head[None, :], other=0.0)
        if QUANTIZED:
            at_scale = block * stride_scale_block + offset * stride_scale_slot + kv_head * stride_scale_head
            key, value = key.to(tl.float32).to(query.dtype), value.to(tl.float32).to(query.dtype)
        score = tl.dot(key, query, input_precision=PRECISION) * scale  # [N, H]
        if QUANTIZED:
            score *= tl.load(key_scale + at_scale, mask=visible, other=0.0)[:, None]
        if SOFTCAP:
            score = soft_capped(score, softcap, PRECISION)
        score = tl.where(visible[:, None], score * 1.4426950408889634, float("-inf"))  # log2(e)
        new_largest = tl.maximum(largest, tl.max(score, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a whole tile may lie before the window
        weight = tl.exp2(score - base[None, :])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weight, 0)
        largest = new_largest
        if QUANTIZED:
            weight *= tl.load(value_scale + at_scale, mask=visible, other=0.0)[:, None]
        acc = tl.dot(tl.trans(value), weight.to(query.dtype), acc * shrink[None, :], input_precision=PRECISION)

    mean = acc / total[None, :]
    stored = in_group[None, :] & in_head[:, None]
    if context + SPLIT >= seq_len:  # the only split: nothing to merge
        at_out = out + row * stride_out_row + head[None, :] * stride_out_head + d_range[:, None]
        tl.store(at_out, mean.to(out.dtype.element_ty), mask=stored)
    else:
        num_heads, num_rows = tl.num_programs(0) * GROUP, tl.num_programs(1)
        at_part = ((split * num_rows + row) * num_heads + head).to(tl.int64)
        tl.store(partial + at_part[None, :] * HEAD_DIM + d_range[:, None], mean, mask=stored)
        tl.store(partial_lse + at_part, largest + tl.log2(total), mask=in_group)


@triton.jit
def _first_key(seq_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of the first tile in which the query sees anything."""
    first = 0
    if WINDOW:
        first = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _merge_splits(
    partial, partial_lse, seq_lens, out, stride_out_row, stride_out_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    num_heads, num_rows = tl.num_programs(0), tl.num_programs(1)
    seq_len = tl.load(seq_lens + row)
    num_splits = tl.cdiv(seq_len - _first_key(seq_len, WINDOW, BLOCK_N), SPLIT)
    d_range = tl.arange(0, BLOCK_D)
    in_head = d_range < HEAD_DIM
    at_out = out + row * stride_out_row + head * stride_out_head + d_range
    if num_splits == 0:  # a row that only pads the batch
        tl.store(at_out, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=in_head)
    if num_splits <= 1:
        return
    largest, total = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for split in range(num_splits):
        at = ((split * num_rows + row) * num_heads + head).to(tl.int64)
        lse = tl.load(partial_lse + at)
        new_largest = tl.maximum(largest, lse)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink, weight = tl.exp2(largest - base), tl.exp2(lse - base)
        acc = acc * shrink + weight * tl.load(partial + at * HEAD_DIM + d_range, mask=in_head, other=0.0)
        total = total * shrink + weight
        largest = new_largest
    tl.store(at_out, (acc / total).to(out.dtype.element_ty), mask=in_head)


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Twin of `reference.paged_decode`; there are shapes and meanings."""
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    if keys.stride() != values.stride() or keys.stride(3) != 1 or q.stride(2) != 1:
        raise ValueError("expected keys and values with the same strides, and head_dim contiguous everywhere")
    out = torch.empty_like(q)
    tile, options = tile_of(head_dim, group, q.element_size(), architecture())
    seen = max_seq_len if window is None else min(max_seq_len, window + tile["BLOCK_N"])
    max_splits = triton.cdiv(seen, SPLIT)
    partial = q.new_empty((max_splits, num_rows, num_heads, head_dim), dtype=torch.float32)
    partial_lse = q.new_empty((max_splits, num_rows, num_heads), dtype=torch.float32)
    scales = key_scale if key_scale is not None else seq_lens.view(-1, 1, 1)
    launch(
        _paged_decode, (num_kv_heads, num_rows, max_splits),
        q, keys, values, out, partial, partial_lse, block_table, seq_lens, key_scale, value_scale,
        scale, 1.0 if softcap is None else softcap,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        *keys.stride()[:3], *scales.stride()[:3], block_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SPLIT=SPLIT,
        WINDOW=window or 0, SOFTCAP=softcap is not None, QUANTIZED=key_scale is not None,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32", options=options, **tile,
    )  # fmt: skip
    launch(
        _merge_splits, (num_heads, num_rows),
        partial, partial_lse, seq_lens, out, out.stride(0), out.stride(1),
        HEAD_DIM=head_dim, BLOCK_D=tile["BLOCK_D"], BLOCK_N=tile["BLOCK_N"], SPLIT=SPLIT, WINDOW=window or 0,
        options={"num_warps": 1},
    )  # fmt: skip
    return out


def tile_of(head_dim: int, group: int, element_size: int, gpu: Architecture) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options; they depend on nothing that changes from step to step."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    small = element_size == 4 or (block_d > 128 and gpu.shared_bytes < 96 * 1024)
    tile = {
        "BLOCK_H": max(16, triton.next_power_of_2(group)),
        "BLOCK_D": block_d,
        "BLOCK_N": 32 if small else 64,
    }
    return tile, {"num_warps": 4, "num_stages": 2 if element_size < 4 else 1}
