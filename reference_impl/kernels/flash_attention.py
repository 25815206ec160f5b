"""Attention of ragged queries over the paged cache: prompts, their chunks, prefix hits, trees of drafts.

FlashAttention-2 (Dao 2023): a program owns BLOCK_M queries of one head and walks over the keys in tiles of BLOCK_N. It
keeps, per query, the largest score so far (m), the sum of exp(score - m) (l), and the weighted sum of values (acc);
when a larger score turns up, l and acc are scaled down by exp(old m - new m). No score ever leaves the chip.

Per program, for n keys seen: 4 n BLOCK_M head_dim FLOPs, and 2 n head_dim values read from the cache, which the query
heads of a group, launched side by side, find in the L2. Queries are read and outputs written once.

Skip-softmax (BLASST, Yuan et al. 2025): a tile whose scores all lie under the running maximum by the logarithm of a
threshold is left out, with its values unread. A key left out has less than `threshold` of the weight of the key with
the largest score, so n keys left out change the output by less than 2 n x threshold x max |value|.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.kv_scales import halves, strides_of_scales
from reference_impl.kernels.launch import architecture, launch

# A row's largest score begins with the least finite float32: where all scores are -infinity, their differences from
# -infinity would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def soft_capped(score, cap, PRECISION: tl.constexpr):
    """cap x tanh(score / cap); tanh(x) = 2 sigmoid(2 x) - 1.

    Float32 would show what a GPU's exp and division, wrong in their last bits, lose in that difference: there tanh(|x|)
    is (1 - e) / (1 + e) with e = exp(-2 |x|), and near 0, where digits cancel all the same, its Taylor series.
    """
    if PRECISION == "ieee":
        x = tl.div_rn(score, cap)
        e = tl.exp(-2 * tl.abs(x))
        tanh = tl.div_rn(1 - e, 1 + e)
        s = x * x
        series = x * (1 - s * (1 / 3 - s * (2 / 15 - s * (17 / 315 - s * (62 / 2835)))))
        tanh = tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0, -tanh, tanh))
    else:
        tanh = 2 * tl.sigmoid(2 * (score / cap)) - 1
    return cap * tanh


@triton.jit
def _row_of(query_start_loc, num_rows, tile, BLOCK_M: tl.constexpr):
    """Tiles are dealt row after row, each row's share rounded up: row r begins no later than tile start // M + r."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _num_bits(x):
    """How many bits of a uint32 are set (Warren, "Hacker's Delight", figure 5-2)."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


# Rows of several queries begin anywhere in a step's arrays: each alignment would need a compilation of its own.
@triton.jit(do_not_specialize=["num_rows", "stride_table"], do_not_specialize_on_alignment=["block_table", "seq_lens"])
def _flash_attention(
    q, keys, values, out,
    block_table, query_start_loc, seq_lens,
    key_scale, value_scale,  # of a quantized cache
    ancestors,  # of drafts in a tree
    num_rows, scale, softcap, skip_below,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_block, stride_slot, stride_head,
    stride_scale_block, stride_scale_slot, stride_scale_head, stride_lowest,
    stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr, TREE: tl.constexpr, SKIP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    row = _row_of(query_start_loc, num_rows, tile, BLOCK_M)
    token = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - token
    first = (tile - (token // BLOCK_M + row)) * BLOCK_M  # of this tile's queries, within the row
    if first >= query_len:
        return
    context_len = tl.load(seq_lens + row) - query_len  # what was in the cache before this step

    # In 4 bits a byte has a number of each half of a head: two products, of the halves, and nothing to interleave.
    PACKED: tl.constexpr = keys.dtype.element_ty == tl.uint8
    HALF: tl.constexpr = HEAD_DIM // 2
    m_range, d_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D // 2 if PACKED else BLOCK_D)
    in_head, in_row = d_range < (HALF if PACKED else HEAD_DIM), first + m_range < query_len
    position = context_len + first + m_range  # of each query; in a tree, where it lies in the cache
    # In 64 bits: tokens x heads x head_dim may pass 2^31.
    number = (token + first + m_range).to(tl.int64)
    if context_len < 0:  # a row of length 0 pads the batch, and sees nothing
        at_out = out + number[:, None] * stride_out_token + head * stride_out_head + d_range[None, :]
        zeros = tl.zeros([BLOCK_M, d_range.shape[0]], out.dtype.element_ty)
        tl.store(at_out, zeros, mask=in_row[:, None] & in_head[None, :])
        if PACKED:
            tl.store(at_out + HALF, zeros, mask=in_row[:, None] & in_head[None, :])
        return
    at_q = q + number[:, None] * stride_q_token + head * stride_q_head + d_range[None, :]
    query = tl.load(at_q, mask=in_row[:, None] & in_head[None, :], other=0.0)
    if PACKED:
        query_high = tl.load(at_q + HALF, mask=in_row[:, None] & in_head[None, :], other=0.0)
        sum_of_query = tl.sum(query.to(tl.float32), 1) + tl.sum(query_high.to(tl.float32), 1)  # [M]
        acc_high = tl.zeros([BLOCK_M, d_range.shape[0]], tl.float32)
    oldest = context_len + first - WINDOW + 1  # that a window may show
    if TREE:
        sees = tl.load(ancestors + token + first + m_range, mask=in_row, other=0)
        in_tree = sees != 0
        # Two words of 32 bits: with one of 64 some kernels would need more registers than there are.
        low_bits, high_bits = sees.to(tl.uint32), (sees >> 32).to(tl.uint32)
        oldest = tl.minimum(oldest, context_len - WINDOW + 1)

    # Keys [low, end) are seen by some query of the tile, keys [full, partial) by all: there nothing is masked.
    end = context_len + tl.minimum(first + BLOCK_M, query_len)
    low, full = 0, 0
    partial = (context_len if TREE else context_len + first + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        low = tl.maximum(oldest, 0) // BLOCK_N * BLOCK_N
        full = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
        partial = tl.maximum(partial, low)
        full = tl.minimum(full, partial)

    largest = tl.full([BLOCK_M], LOWEST, tl.float32)  # m
    total = tl.zeros([BLOCK_M], tl.float32)  # l
    acc = tl.zeros([BLOCK_M, d_range.shape[0]], tl.float32)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        start = low if phase == 0 else (full if phase == 1 else partial)
        stop = full if phase == 0 else (partial if phase == 1 else end)
        for n in range(start, stop, BLOCK_N):
            key_pos = n + tl.arange(0, BLOCK_N)
            exists = key_pos < end  # what lies behind was never written: it may be anything, NaN too
            if WINDOW and phase != 1:  # and blocks before the window may be another's by now
                exists &= key_pos >= oldest
            block = tl.load(block_table + row * stride_table + key_pos // BLOCK_SIZE, mask=exists, other=0)
            block, offset = block.to(tl.int64), key_pos % BLOCK_SIZE
            at = block * stride_block + offset * stride_slot + kv_head * stride_head
            key = tl.load(keys + at[None, :] + d_range[:, None], mask=exists[None, :] & in_head[:, None], other=0.0)
            if QUANTIZED:
                at_scale = block * stride_scale_block + offset * stride_scale_slot + kv_head * stride_scale_head
            if PACKED:
                key, key_high = halves(key, query.dtype)
                score = tl.dot(query, key, input_precision=PRECISION)
                score = tl.dot(query_high, key_high, score, input_precision=PRECISION) * scale
            else:
                if QUANTIZED:
                    key = key.to(tl.float32).to(query.dtype)
                score = tl.dot(query, key, input_precision=PRECISION) * scale
            if QUANTIZED:
                score *= tl.load(key_scale + at_scale, mask=exists, other=0.0).to(tl.float32)[None, :]
            if PACKED:
                lowest = tl.load(key_scale + at_scale + stride_lowest, mask=exists, other=0.0).to(tl.float32)
                score += (sum_of_query * scale)[:, None] * lowest[None, :]
            if SOFTCAP:
                score = soft_capped(score, softcap, PRECISION)
            score *= 1.4426950408889634  # log2(e): the chip computes powers of 2
            if phase != 1:
                visible = key_pos[None, :] <= position[:, None]
                if TREE:
                    own = tl.minimum(tl.maximum(key_pos - context_len, 0), 63)
                    in_low = own[None, :] < 32
                    from_key = (
                        tl.where(in_low, low_bits[:, None], high_bits[:, None]) >> (own & 31).to(tl.uint32)[None, :]
                    )
                    visible &= (key_pos < context_len)[None, :] | ((from_key & 1) == 1) | ~in_tree[:, None]
                    if WINDOW:
                        # Positions in a tree: as many back from a node as it has ancestors from the key on.
                        num_high = _num_bits(high_bits)[:, None]
                        place = tl.where(
                            in_tree[:, None], _num_bits(low_bits)[:, None] + num_high - 1, first + m_range[:, None]
                        )
                        back = context_len + place - key_pos[None, :]
                        own_back = _num_bits(from_key) + tl.where(in_low, num_high, 0) - 1
                        in_context = (key_pos < context_len)[None, :] | ~in_tree[:, None]
                        visible &= tl.where(in_context, back, own_back) < WINDOW
                elif WINDOW:
                    visible &= key_pos[None, :] > position[:, None] - WINDOW
                score = tl.where(visible, score, float("-inf"))
            power = score
            if QUANTIZED:
                scale_of_value = tl.load(value_scale + at_scale, mask=exists, other=1.0).to(tl.float32)[None, :]
                if query.dtype == tl.float16 and not SKIP:  # as in paged_decode.py; what is skipped depends on scores
                    power += tl.log2(scale_of_value)
            tile_largest = tl.max(power, 1)
            needed = True
            if SKIP:
                seen = tl.max(tl.where(power == power, power, float("inf")), 1)  # max drops NaN, which must stay
                needed = tl.max(tl.where(in_row, seen - largest, float("-inf"))) >= skip_below
            if needed:
                new_largest = tl.maximum(largest, tile_largest)
                weight = tl.exp2(score - new_largest[:, None])
                shrink = tl.exp2(largest - new_largest)
                total = total * shrink + tl.sum(weight, 1)
                largest = new_largest
                value = tl.load(
                    values + at[:, None] + d_range[None, :], mask=exists[:, None] & in_head[None, :], other=0.0
                )
                acc *= shrink[:, None]
                if PACKED:
                    lowest = tl.load(value_scale + at_scale + stride_lowest, mask=exists, other=0.0).to(tl.float32)
                    shift = tl.sum(weight * lowest[None, :], 1)[:, None]
                    weight *= scale_of_value
                    value, value_high = halves(value, query.dtype)
                    acc, acc_high = acc + shift, acc_high * shrink[:, None] + shift
                    acc_high = tl.dot(weight.to(query.dtype), value_high, acc_high, input_precision=PRECISION)
                elif QUANTIZED:
                    weight *= scale_of_value
                    value = value.to(tl.float32).to(query.dtype)
                acc = tl.dot(weight.to(query.dtype), value, acc, input_precision=PRECISION)

    number = (token + first + m_range).to(tl.int64)
    at_out = out + number[:, None] * stride_out_token + head * stride_out_head + d_range[None, :]
    total = tl.where(total == 0, 1.0, total)  # all scores are -infinity: zeros, as of torch's attention
    tl.store(at_out, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_row[:, None] & in_head[None, :])
    if PACKED:
        acc_high = (acc_high / total[:, None]).to(out.dtype.element_ty)
        tl.store(at_out + HALF, acc_high, mask=in_row[:, None] & in_head[None, :])


def flash_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    ancestors: Tensor | None = None,
    skip_threshold: float = 0.0,
) -> Tensor:
    """Twin of `reference.flash_attention`, which documents shapes and meanings.

    skip_threshold: 0 is exact. A tile with a score that is NaN is not left out. The values of a tile that is left out
    are not read, so NaN among them has no effect. Raises TypeError or ValueError for what the kernel cannot compute.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    num_rows = len(seq_lens)
    if keys.stride() != values.stride() or keys.stride(3) != 1 or q.stride(2) != 1:
        raise ValueError("expected keys and values with the same strides, and head_dim contiguous everywhere")
    out = torch.empty_like(q)
    packed = keys.dtype is torch.uint8
    tile, options = tile_of(head_dim, q.element_size(), architecture(), ancestors is not None, packed)
    quantized, strides_of_scale = key_scale is not None, strides_of_scales(keys, key_scale, value_scale)
    launch(
        _flash_attention, (num_heads, num_tokens // tile["BLOCK_M"] + num_rows),
        q, keys, values, out, block_table, query_start_loc, seq_lens,
        key_scale, value_scale, ancestors,
        num_rows, scale, 1.0 if softcap is None else softcap, math.log2(skip_threshold) if skip_threshold else 0.0,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        *keys.stride()[:3], *strides_of_scale, block_table.stride(0),
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        WINDOW=window or 0, SOFTCAP=softcap is not None, QUANTIZED=quantized, TREE=ancestors is not None,
        SKIP=skip_threshold > 0, PRECISION="ieee" if q.dtype is torch.float32 else "tf32", options=options, **tile,
    )  # fmt: skip
    return out


def tile_of(
    head_dim: int, element_size: int, gpu: Architecture, tree: bool = False, packed: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options for a head size. They depend on nothing else of the batch than whether there are trees, because
    a row's result must not depend on its neighbours. Trees are small and their masks take registers, so their tiles are
    small, too. What fits without spilling is in compiled.json."""
    block_d = max(32 if packed else 16, triton.next_power_of_2(head_dim))  # the matrix units take 16, of a half, too
    stages = 2
    if element_size == 4:
        block_m, block_n, warps, stages = 32, 32, 4, 1
    elif block_d <= 64:
        block_m, block_n, warps = 128, 128 if gpu.is_large else 64, 8
    elif gpu.is_large:
        block_m, block_n, warps = 128, 64 if block_d <= 128 else 32, 8
    else:
        block_m, block_n, warps = 64, 32, 4 if block_d <= 128 else 8
    if packed and element_size != 4:  # two halves of keys and of values take registers
        if gpu.target.backend == "hip":
            block_m, block_n, warps, stages = 64, 32 if block_d <= 128 else 16, 8, 1
        elif gpu.is_large:
            block_m, block_n, warps = 64, 64 if block_d <= 128 else 32, 8
    if tree and element_size != 4:
        block_m, block_n, warps = 64, 32, 8
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d}
    return tile, {"num_warps": warps, "num_stages": stages}
