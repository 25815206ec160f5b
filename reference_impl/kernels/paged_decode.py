"""Attention of one query per row over the paged cache: decoding, in one launch.

One query reads the whole context, 2 x head_dim values per key and KV head for 4 x head_dim x (heads of the group)
FLOPs: memory-bound. So (1) the query heads of a group share one read of the keys: they take the place of
FlashAttention's several queries; (2) a long context is cut into splits (Flash-Decoding, Dao et al. 2023), so that even
a single row fills the GPU. Of the programs of a row and KV head, the last one to finish merges the splits: it is found
by tickets, as in gemm.py.

For split s, m_s is the largest score, t_s the sum of 2^(score - m_s), and a_s that of 2^(score - m_s) x value. The
whole is sum_s 2^(m_s - m) a_s / sum_s 2^(m_s - m) t_s, with m the largest m_s: no power overflows.
With a cache of 8 or 4 bits, a weight is multiplied by its value's scale before it is rounded for the matrix unit. In
float16 small products would be lost: there m_s is the largest score + log2(scale), so that the largest of them is 1.
In 4 bits a number is code x scale + lowest, and lowest numbers are added after the products: lowest x sum q to the
scores, and sum weight x lowest to all of a head's sums.

Where splits begin follows from the row's own context, so a row's result does not depend on its neighbours. Which
program computes which splits does not affect the result, so it follows from the shape of the batch, see `grid_of`.
Bytes per row: 2 x context x kv_heads x head_dim values are read. A split writes heads x (head_dim + 2) x 4 bytes more,
which are read once, from the L2: with 16 bits, four heads in a group, splits of 256 keys, 1.6 % of what is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.flash_attention import LOWEST, soft_capped
from reference_impl.kernels.kv_scales import column_of, strides_of_scales, unpacked
from reference_impl.kernels.launch import architecture, launch, tickets_of

SPLIT = 256  # keys, in a context of middle length


@triton.jit(do_not_specialize=["max_splits", "stride_table"])
def _paged_decode(
    q, keys, values, out, partial, statistics, tickets,
    block_table, seq_lens, key_scale, value_scale,
    scale, softcap, max_splits,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    stride_block, stride_slot, stride_head,
    stride_scale_block, stride_scale_slot, stride_scale_head, stride_lowest,
    stride_table,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head, row, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    start = 0  # of the context: the first tile in which the query sees anything
    if WINDOW:
        start = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    split_keys = BLOCK_N * tiles_of_split(seq_len - start, BLOCK_N, SPLIT, SHORT, LONG)
    splits = tl.cdiv(seq_len - start, split_keys)
    programs = tl.num_programs(2)
    first, end = tl.cdiv(program * splits, programs), tl.cdiv((program + 1) * splits, programs)
    if (first == end) & (program > 0):
        return

    h_range, d_range, n_range = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    in_group, in_head = h_range < GROUP, d_range < HEAD_DIM
    PACKED: tl.constexpr = keys.dtype.element_ty == tl.uint8
    c_range = tl.arange(0, BLOCK_D // 2) if PACKED else d_range  # of a stored head
    in_stored = c_range < (HEAD_DIM // 2 if PACKED else HEAD_DIM)
    d_range = column_of(d_range, HEAD_DIM, PACKED)
    head = kv_head * GROUP + h_range
    at_q = q + row.to(tl.int64) * stride_q_row + head[None, :] * stride_q_head + d_range[:, None]
    query = tl.load(at_q, mask=in_group[None, :] & in_head[:, None], other=0.0)  # [D, H]
    if PACKED:
        sum_of_query = tl.sum(query.to(tl.float32), 0)  # [H]
    at_table = block_table + row * stride_table
    pair = row * tl.num_programs(0) + kv_head
    at_pair = pair.to(tl.int64) * max_splits * GROUP  # where the partial results of this row and KV head begin

    # A program's splits are one loop, so that loads do not stop between them.
    # Everything lies transposed, keys along the first axis: so the few heads are the small side of the matrix
    # instruction (N = 16), and the keys its large one (M = 64).
    largest = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
    begin, last = start + first * split_keys, tl.minimum(start + end * split_keys, seq_len)
    split, split_end = first, begin + split_keys
    key_pos = begin + n_range  # divided as unsigned numbers, which is one shift
    next_block = tl.load(at_table + key_pos.to(tl.uint32) // BLOCK_SIZE, mask=key_pos < last, other=0)
    for n in range(begin, last, BLOCK_N):
        key_pos = n + n_range
        visible = key_pos < last
        if WINDOW:
            visible &= key_pos >= seq_len - WINDOW
        block, offset = next_block.to(tl.int64), key_pos.to(tl.uint32) % BLOCK_SIZE
        # The blocks of the tile after this: where one load waits for another of the same turn, the compiler sends
        # neither ahead. So two tiles of keys and values are under way while a third is computed.
        next_pos = key_pos + BLOCK_N
        next_block = tl.load(at_table + next_pos.to(tl.uint32) // BLOCK_SIZE, mask=next_pos < last, other=0)
        at = (block * stride_block + offset * stride_slot + kv_head * stride_head)[:, None] + c_range[None, :]
        key = tl.load(keys + at, mask=visible[:, None] & in_stored[None, :], other=0.0)  # [N, D]
        value = tl.load(values + at, mask=visible[:, None] & in_stored[None, :], other=0.0)
        if QUANTIZED:
            at_scale = block * stride_scale_block + offset * stride_scale_slot + kv_head * stride_scale_head
            if PACKED:
                key, value = unpacked(key, query.dtype), unpacked(value, query.dtype)
            else:
                key, value = key.to(tl.float32).to(query.dtype), value.to(tl.float32).to(query.dtype)
        score = tl.dot(key, query, input_precision=PRECISION) * scale  # [N, H]
        if QUANTIZED:
            score *= tl.load(key_scale + at_scale, mask=visible, other=0.0).to(tl.float32)[:, None]
        if PACKED:
            lowest = tl.load(key_scale + at_scale + stride_lowest, mask=visible, other=0.0).to(tl.float32)
            score += lowest[:, None] * (sum_of_query * scale)[None, :]
        if SOFTCAP:
            score = soft_capped(score, softcap, PRECISION)
        score = tl.where(visible[:, None], score * 1.4426950408889634, float("-inf"))  # log2(e)
        power = score
        if QUANTIZED:
            scale_of_value = tl.load(value_scale + at_scale, mask=visible, other=1.0).to(tl.float32)[:, None]
            if query.dtype == tl.float16:
                power += tl.log2(scale_of_value)
        new_largest = tl.maximum(largest, tl.max(power, 0))
        weight = tl.exp2(score - new_largest[None, :])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weight, 0)
        largest = new_largest
        acc *= shrink[None, :]
        if PACKED:
            lowest = tl.load(value_scale + at_scale + stride_lowest, mask=visible, other=0.0).to(tl.float32)
            acc += tl.sum(weight * lowest[:, None], 0)[None, :]
        if QUANTIZED:
            weight *= scale_of_value
        acc = tl.dot(tl.trans(value), weight.to(query.dtype), acc, input_precision=PRECISION)
        if (n + BLOCK_N == split_end) | (n + BLOCK_N >= last):  # a split is done
            at_part = at_pair + split * GROUP + h_range
            in_part = in_group[None, :] & in_head[:, None]
            tl.store(partial + at_part[None, :] * HEAD_DIM + d_range[:, None], acc, mask=in_part)
            tl.store(statistics + 2 * at_part, largest, mask=in_group)
            tl.store(statistics + 2 * at_part + 1, total, mask=in_group)
            largest = tl.full([BLOCK_H], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
            split, split_end = split + 1, split_end + split_keys

    tl.debug_barrier()  # all threads have stored before one of them takes the ticket
    at_work = tl.minimum(splits, programs)
    ticket = at_work - 1
    if at_work > 1:
        ticket = tl.atomic_add(tickets + pair, 1, sem="acq_rel", scope="gpu")
    if ticket >= at_work - 1:  # the last one; also the only one of a row that pads the batch, which has no split
        if at_work > 1:
            tl.store(tickets + pair, 0)  # for the next launch
        at_out = out + row.to(tl.int64) * stride_out_row + kv_head * GROUP * stride_out_head
        _merge(partial + at_pair * HEAD_DIM, statistics + 2 * at_pair, splits, at_out, stride_out_head,
               GROUP, HEAD_DIM, BLOCK_D)  # fmt: skip


@triton.jit
def tiles_of_split(keys, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr):
    """SHORT splits as long as they have no more than SPLIT keys; then more splits, of SPLIT keys; at last LONG splits.

    Smaller ones let a lone row end sooner; larger ones write and read less.
    """
    short, long = tl.cdiv(keys, SHORT * BLOCK_N), tl.cdiv(keys, LONG * BLOCK_N)
    return tl.maximum(tl.maximum(tl.minimum(short, SPLIT // BLOCK_N), long), 1)


@triton.jit
def _merge(
    partial, statistics, splits, out, stride_out_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of one row and KV head: partial [splits, GROUP, HEAD_DIM], statistics [splits, GROUP, 2] (largest, total).

    They come from the L2 (.cg, found on sm_90): what this multiprocessor's L1 holds of them may be older.
    """
    BLOCK_H: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_S: tl.constexpr = max(1, min(16, 8192 // (BLOCK_H * BLOCK_D)))
    h_range, d_range = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    in_group, in_head = h_range < GROUP, d_range < HEAD_DIM
    largest = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        there = (split < splits)[:, None] & in_group[None, :]  # [S, H]
        at = split[:, None] * GROUP + h_range[None, :]
        m = tl.load(statistics + 2 * at, mask=there, other=LOWEST, cache_modifier=".cg")
        t = tl.load(statistics + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg")
        at = partial + at[:, :, None] * HEAD_DIM + d_range[None, None, :]
        a = tl.load(at, mask=there[:, :, None] & in_head[None, None, :], other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, tl.max(m, 0))
        weight, shrink = tl.exp2(m - new_largest[None, :]), tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weight * t, 0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * a, 0)
        largest = new_largest
    mean = acc / tl.where(total == 0, 1.0, total)[:, None]  # zeros where there is no split, or no score above -infinity
    at_out = out + h_range[:, None] * stride_out_head + d_range[None, :]
    tl.store(at_out, mean.to(out.dtype.element_ty), mask=in_group[:, None] & in_head[None, :])


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
    """Twin of `reference.paged_decode`, which documents shapes and meanings.

    The grid follows from shapes and max_seq_len, so in a CUDA graph max_seq_len is a bound for all replays.
    """
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    if keys.stride() != values.stride() or keys.stride(3) != 1 or q.stride(2) != 1:
        raise ValueError("expected keys and values with the same strides, and head_dim contiguous everywhere")
    quantized, strides_of_scale = key_scale is not None, strides_of_scales(keys, key_scale, value_scale)
    out, gpu = torch.empty_like(q), architecture()
    if not num_rows:
        return out
    tile, options = tile_of(head_dim, group, q.element_size(), quantized, gpu)
    short, long = splits_of(num_kv_heads, gpu)
    seen = max_seq_len if window is None else min(max_seq_len, window + tile["BLOCK_N"])
    max_splits = most_splits(seen, tile["BLOCK_N"], short, long)
    partial = q.new_empty((num_rows, num_kv_heads, max_splits, group, head_dim), dtype=torch.float32)
    statistics = q.new_empty((num_rows, num_kv_heads, max_splits, group, 2), dtype=torch.float32)
    launch(
        _paged_decode, grid_of(num_rows, num_kv_heads, max_splits, gpu),
        q, keys, values, out, partial, statistics, tickets_of(q.device),
        block_table, seq_lens, key_scale, value_scale,
        scale, 1.0 if softcap is None else softcap, max_splits,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        *keys.stride()[:3], *strides_of_scale, block_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        SPLIT=SPLIT, SHORT=short, LONG=long,
        WINDOW=window or 0, SOFTCAP=softcap is not None, QUANTIZED=quantized,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32", options=options, **tile,
    )  # fmt: skip
    return out


def tile_of(
    head_dim: int, group: int, element_size: int, quantized: bool, gpu: Architecture
) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options, from what stays the same in all steps."""
    block_h, block_d = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))
    # Crowded: the scores and sums of many heads, or long keys and values of 8 bits while they become 16. With 64 keys
    # at a time they spill even in 8 warps; many spill with 32 in 4 (on AMD, where a warp has more registers, in 8).
    crowded = block_h * max(block_d, 64) >= 64 * 128 or (quantized and block_d > 128)
    small = crowded or element_size == 4 or (block_d > 128 and gpu.shared_bytes < 96 * 1024)
    tile = {"BLOCK_H": block_h, "BLOCK_D": block_d, "BLOCK_N": 32 if small else 64}
    amd = gpu.target.backend == "hip"
    stages = 1 if element_size == 4 or (crowded and amd) else 3 if gpu.is_large else 2
    # On Blackwell, accumulators of tensor memory pass through registers, and four warps would have too few of them.
    eight = gpu.name == "sm_100" or (crowded and not amd)
    return tile, {"num_warps": 8 if eight else 4, "num_stages": stages}


def splits_of(num_kv_heads: int, gpu: Architecture) -> tuple[int, int]:
    """How many splits a short context has, and a long one, so that one row gives every multiprocessor one or two."""
    return max(gpu.multiprocessors // num_kv_heads, 1), max(2 * gpu.multiprocessors // num_kv_heads, 1)


def most_splits(keys: int, block_n: int, short: int, long: int) -> int:
    """The largest number of splits of a context of up to `keys` keys, as `tiles_of_split` cuts it."""
    return max(min(-(-keys // block_n), short), min(-(-keys // SPLIT), long), 1)


def grid_of(num_rows: int, num_kv_heads: int, max_splits: int, gpu: Architecture) -> tuple[int, int, int]:
    """(KV heads, rows, programs of each row and KV head): 24 or more programs per multiprocessor, if splits suffice.

    The number is bounded, because with one long row among many short ones most programs have no split: they load one
    number and end.
    """
    return num_kv_heads, num_rows, min(max_splits, -(-24 * gpu.multiprocessors // (num_rows * num_kv_heads)))
