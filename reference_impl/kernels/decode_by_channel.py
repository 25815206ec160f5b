"""Attention of one query per row over a cache by channel (KIVI, Liu et al. 2024): `paged_decode.py`, which says how
splits and their merging work, with keys whose scales are those of a block and a channel.

The query reads its own block as it is: the first program of a row and KV head begins with it. What lies before is full
blocks. Their keys become code x scale + lowest in registers, each block's scales loaded once for all its tokens; of
values, scale and lowest number of a token are multiplied to its weight and added behind the products.

Bytes per row: (head_dim + 4) x context x kv_heads, and 4 head_dim x kv_heads for each block: with head_dim 128 and
blocks of 16, 0.32 of what 16 bits take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.by_channel import by_channel, check_memory, either, piece_of
from reference_impl.kernels.flash_attention import soft_capped
from reference_impl.kernels.kv_scales import column_of, unpacked
from reference_impl.kernels.launch import architecture, launch, tickets_of, wait_for_previous
from reference_impl.kernels.paged_decode import (
    SPLIT,
    _merge,
    grid_of,
    most_splits,
    splits_of,
    tiles_of_split,
)
from reference_impl.kernels.reference.by_channel import ByChannel


@triton.jit
def _seen(score, visible, value, scale_of_value, lowest, largest, total, acc, softcap,
          SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One tile more: score [N, H] in natural units, value [N, D] before x scale_of_value + lowest, [N] each."""
    if SOFTCAP:
        score = soft_capped(score, softcap, PRECISION)
    score = tl.where(visible[:, None], score * 1.4426950408889634, float("-inf"))  # log2(e)
    power = score
    if value.dtype == tl.float16:  # small products would be lost
        power += tl.log2(scale_of_value)[:, None]
    new_largest = tl.maximum(largest, tl.max(power, 0))
    weight = tl.exp2(score - new_largest[None, :])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weight, 0)
    acc = acc * shrink[None, :] + tl.sum(weight * lowest[:, None], 0)[None, :]
    weight = (weight * scale_of_value[:, None]).to(value.dtype)
    return new_largest, total, tl.dot(tl.trans(value), weight, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["max_splits", "stride_table"])
def _decode_by_channel(
    q, k, v, keys, values, key_scale, value_scale, open_keys, open_values, out, partial, statistics, tickets,
    seats, block_table, seq_lens,
    scale, softcap, max_splits,
    stride_q_row, stride_q_head, stride_k_row, stride_k_head, stride_v_row, stride_v_head,
    stride_out_row, stride_out_head, stride_table,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr, OPEN_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    kv_head, row, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    KV_HEADS, programs = tl.num_programs(0), tl.num_programs(2)
    seq_len = tl.load(seq_lens + row)
    # Where the query's block begins: before it keys are rounded.
    own = tl.maximum(seq_len - 1, 0) // BLOCK_SIZE * BLOCK_SIZE
    # Full blocks are counted in pieces, of which the window shows those from `start` on.
    PIECES: tl.constexpr = (BLOCK_SIZE + PIECE - 1) // PIECE  # of a block
    TILE: tl.constexpr = BLOCK_N // PIECE
    num_pieces, oldest, start = own // BLOCK_SIZE * PIECES, 0, 0
    if WINDOW:
        oldest = tl.maximum(seq_len - WINDOW, 0)
        start = tl.minimum(oldest // BLOCK_SIZE * PIECES + oldest % BLOCK_SIZE // PIECE, num_pieces)
    split_pieces = TILE * tiles_of_split((num_pieces - start) * PIECE, BLOCK_N, SPLIT, SHORT, LONG)
    splits = tl.maximum(tl.cdiv(num_pieces - start, split_pieces), tl.minimum(seq_len, 1))  # none for one that pads
    first, end = tl.cdiv(program * splits, programs), tl.cdiv((program + 1) * splits, programs)
    if (first == end) & (program > 0):
        return

    h_range, d_range, n_range = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    in_group, in_head = h_range < GROUP, d_range < HEAD_DIM
    c_range, p_range = tl.arange(0, BLOCK_D // 2), tl.arange(0, TILE)
    in_stored = c_range < HEAD_DIM // 2
    d_range = column_of(d_range, HEAD_DIM, True)
    head = kv_head * GROUP + h_range
    at_q = q + row.to(tl.int64) * stride_q_row + head[None, :] * stride_q_head + d_range[:, None]
    query = tl.load(at_q, mask=in_group[None, :] & in_head[:, None], other=0.0)  # [D, H]
    at_table = block_table + row * stride_table
    pair = row * KV_HEADS + kv_head
    at_pair = pair.to(tl.int64) * max_splits * GROUP  # where the partial results of this row and KV head begin
    in_part = in_group[None, :] & in_head[:, None]

    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)

    # The own block, by the first program alone; its last token is the step's.
    ring = tl.load(seats + row).to(tl.int64) * (OPEN_BLOCKS * BLOCK_SIZE)
    at_k = row.to(tl.int64) * stride_k_row + kv_head * stride_k_head + d_range[None, :] + n_range[:, None] * 0
    at_v = row.to(tl.int64) * stride_v_row + kv_head * stride_v_head + d_range[None, :] + n_range[:, None] * 0
    for n in range(tl.maximum(own, oldest) if program == 0 else seq_len, seq_len, BLOCK_N):
        key_pos = n + n_range
        visible = key_pos < seq_len
        inside, is_old = visible[:, None] & in_head[None, :], (key_pos < seq_len - 1)[:, None]
        at = ((ring + key_pos % (OPEN_BLOCKS * BLOCK_SIZE)) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d_range[None, :]
        key, value = either(open_keys, k, at, at_k, is_old, inside), either(open_values, v, at, at_v, is_old, inside)
        score = tl.dot(key, query, input_precision=PRECISION) * scale  # [N, H]
        one, none = tl.full([BLOCK_N], 1.0, tl.float32), tl.zeros([BLOCK_N], tl.float32)
        largest, total, acc = _seen(score, visible, value, one, none, largest, total, acc, softcap, SOFTCAP, PRECISION)

    begin, last = start + first * split_pieces, tl.minimum(start + end * split_pieces, num_pieces)
    split, split_end = first, begin + split_pieces
    if (begin >= last) & (seq_len > 0):  # there are no full blocks
        at_part = at_pair + h_range
        tl.store(partial + at_part[None, :] * HEAD_DIM + d_range[:, None], acc, mask=in_part)
        tl.store(statistics + 2 * at_part, largest, mask=in_group)
        tl.store(statistics + 2 * at_part + 1, total, mask=in_group)
    # As in paged_decode.py the blocks of a tile are loaded a turn ahead: of each key, and of each piece.
    of_key = begin + n_range // PIECE
    next_block = tl.load(at_table + of_key // PIECES, mask=of_key < last, other=0)
    of_piece = begin + p_range
    next_of_piece = tl.load(at_table + of_piece // PIECES, mask=of_piece < last, other=0)
    for p in range(begin, last, TILE):
        of_key, of_piece = p + n_range // PIECE, p + p_range
        slot = of_key % PIECES * PIECE + n_range % PIECE
        visible, there = (of_key < last) & (slot < BLOCK_SIZE), (of_piece < last)[:, None] & in_head[None, :]
        if WINDOW:
            visible &= of_key // PIECES * BLOCK_SIZE + slot >= oldest
        block, block_of_piece = next_block.to(tl.int64), next_of_piece.to(tl.int64)
        of_key, of_piece = of_key + TILE, of_piece + TILE
        next_block = tl.load(at_table + of_key // PIECES, mask=of_key < last, other=0)
        next_of_piece = tl.load(at_table + of_piece // PIECES, mask=of_piece < last, other=0)
        at = ((block * BLOCK_SIZE + slot) * KV_HEADS + kv_head)[:, None] * (HEAD_DIM // 2) + c_range[None, :]
        key = tl.load(keys + at, mask=visible[:, None] & in_stored[None, :], other=0)  # [N, D / 2]
        value = tl.load(values + at, mask=visible[:, None] & in_stored[None, :], other=0)
        at = (block_of_piece * KV_HEADS + kv_head)[:, None] * (2 * HEAD_DIM) + d_range[None, :]
        channel_scale = tl.load(key_scale + at, mask=there, other=0.0)  # [pieces, D]
        channel_lowest = tl.load(key_scale + at + HEAD_DIM, mask=there, other=0.0)
        at = (block * 2 * KV_HEADS + kv_head) * BLOCK_SIZE + slot
        scale_of_value = tl.load(value_scale + at, mask=visible, other=1.0).to(tl.float32)
        lowest = tl.load(value_scale + at + KV_HEADS * BLOCK_SIZE, mask=visible, other=0.0).to(tl.float32)
        key = by_channel(unpacked(key, query.dtype), channel_scale, channel_lowest, PIECE, query.dtype)
        score = tl.dot(key, query, input_precision=PRECISION) * scale
        largest, total, acc = _seen(
            score, visible, unpacked(value, query.dtype), scale_of_value, lowest, largest, total, acc, softcap,
            SOFTCAP, PRECISION,
        )  # fmt: skip
        if (p + TILE == split_end) | (p + TILE >= last):  # a split is done
            at_part = at_pair + split * GROUP + h_range
            tl.store(partial + at_part[None, :] * HEAD_DIM + d_range[:, None], acc, mask=in_part)
            tl.store(statistics + 2 * at_part, largest, mask=in_group)
            tl.store(statistics + 2 * at_part + 1, total, mask=in_group)
            largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
            split, split_end = split + 1, split_end + split_pieces

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


def decode_by_channel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: ByChannel,
    seats: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Twin of `reference.decode_by_channel`, which documents shapes and meanings.

    For a CUDA graph: the grid follows from shapes and max_seq_len, so max_seq_len is then a bound for all replays.
    ValueError for memory that is laid out otherwise.
    """
    check_memory(cache, q, k, v)
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = cache.keys.shape
    group = num_heads // num_kv_heads
    out, gpu = torch.empty_like(q), architecture()
    if not num_rows:
        return out
    tile, options = tile_of(head_dim, group, q.element_size(), gpu)
    piece, (short, long) = piece_of(block_size, tile["BLOCK_N"]), splits_of(num_kv_heads, gpu)
    blocks = -(-max_seq_len // block_size)
    if window is not None:
        blocks = min(blocks, window // block_size + 2)
    max_splits = most_splits(blocks * -(-block_size // piece) * piece, tile["BLOCK_N"], short, long)
    partial = q.new_empty((num_rows, num_kv_heads, max_splits, group, head_dim), dtype=torch.float32)
    statistics = q.new_empty((num_rows, num_kv_heads, max_splits, group, 2), dtype=torch.float32)
    launch(
        _decode_by_channel, grid_of(num_rows, num_kv_heads, max_splits, gpu),
        q, k, v, *cache[:6], out, partial, statistics, tickets_of(q.device),
        seats, block_table, seq_lens,
        scale, 1.0 if softcap is None else softcap, max_splits,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        block_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, PIECE=piece, OPEN_BLOCKS=cache.open_blocks,
        SPLIT=SPLIT, SHORT=short, LONG=long, WINDOW=window or 0, SOFTCAP=softcap is not None,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32", options=options, **tile,
    )  # fmt: skip
    return out


def tile_of(head_dim: int, group: int, element_size: int, gpu: Architecture) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options, from what stays the same in all steps. Keys with scales of their channels take registers: more
    keys at a time would spill."""
    block_h, block_d = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))
    crowded = block_h * max(block_d, 64) >= 64 * 128 or block_d > 128
    block_n = 16 if crowded else 32 if block_d > 64 or element_size == 4 else 64
    stages = 1 if element_size == 4 else 3 if gpu.is_large and not crowded else 2
    tile = {"BLOCK_H": block_h, "BLOCK_D": block_d, "BLOCK_N": block_n}
    eight = crowded or (block_d > 64 and not gpu.is_large and gpu.target.backend == "cuda")
    return tile, {"num_warps": 8 if eight else 4, "num_stages": stages}
