"""Attention of ragged queries over a cache by channel (KIVI, Liu et al. 2024): `flash_attention.py`, in which each
query reads its own block as it is, and those before it rounded.

A tile of queries walks over two lists of keys: first the full blocks before that of its last query, then, from the
block of its first query on, tokens as they are: the row's new ones, and those before them that were open. A query sees
each position in one of the two.

In a tree of guesses a place in the row is no position, and what a block holds depends on the path: a block that guesses
fill is read from no cache, but rounded anew for each path that has filled one, by each tile, for the queries beyond it:
there keys are read twice, for a channel's scale and for its codes, and values once, as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.by_channel import by_channel, check_memory, either, piece_of
from reference_impl.kernels.flash_attention import _num_bits, _row_of, soft_capped
from reference_impl.kernels.flash_attention import tile_of as tile_of_flash
from reference_impl.kernels.kv_scales import halves
from reference_impl.kernels.launch import architecture, launch
from reference_impl.kernels.reference.by_channel import ByChannel
from reference_impl.kernels.write_by_channel import _codes, _scale_of


@triton.jit
def _seen(score, visible, low, high, scale_of_value, lowest, largest, total, acc, acc_high, softcap,
          SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One tile more: score [M, N] in natural units; low, high [N, D / 2]: halves of values before
    x scale_of_value + lowest, [N] each."""
    if SOFTCAP:
        score = soft_capped(score, softcap, PRECISION)
    score = tl.where(visible, score * 1.4426950408889634, float("-inf"))  # log2(e)
    power = score
    if low.dtype == tl.float16:  # as in paged_decode.py
        power += tl.log2(scale_of_value)[None, :]
    new_largest = tl.maximum(largest, tl.max(power, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weight, 1)
    shift = tl.sum(weight * lowest[None, :], 1)[:, None]
    weight = (weight * scale_of_value[None, :]).to(low.dtype)
    acc = tl.dot(weight, low, acc * shrink[:, None] + shift, input_precision=PRECISION)
    acc_high = tl.dot(weight, high, acc_high * shrink[:, None] + shift, input_precision=PRECISION)
    return new_largest, total, acc, acc_high


@triton.jit
def _nth_bit(low, high, n):
    """Where the n-th bit that is set in two words of 32 is, counted from 0."""
    in_low = _num_bits(low)
    beyond = n >= in_low
    word, place = tl.where(beyond, high, low), tl.where(beyond, 32, 0)
    n -= tl.where(beyond, in_low, 0)
    for halving in tl.static_range(5):
        count = _num_bits(word & ((1 << (16 >> halving)) - 1))
        beyond = n >= count
        word, place = tl.where(beyond, word >> (16 >> halving), word), place + tl.where(beyond, 16 >> halving, 0)
        n -= tl.where(beyond, count, 0)
    return place


@triton.jit(do_not_specialize=["num_rows", "stride_table"],
            do_not_specialize_on_alignment=["block_table", "seq_lens", "seats"])  # fmt: skip
def _flash_by_channel(
    q, k, v, keys, values, key_scale, value_scale, open_keys, open_values, out,
    seats, block_table, query_start_loc, seq_lens,
    ancestors,  # of guesses in a tree
    num_rows, scale, softcap,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_out_token, stride_out_head, stride_table,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr, OPEN_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TREE: tl.constexpr, PRECISION: tl.constexpr,
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

    HALF: tl.constexpr = HEAD_DIM // 2
    m_range, d_range, n_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D // 2), tl.arange(0, BLOCK_N)
    in_half, in_row = d_range < HALF, first + m_range < query_len
    number = (token + first + m_range).to(tl.int64)
    in_out = in_row[:, None] & in_half[None, :]
    at_out = out + number[:, None] * stride_out_token + head * stride_out_head + d_range[None, :]
    if context_len < 0:  # a row of length 0 pads the batch, and sees nothing
        zeros = tl.zeros([BLOCK_M, BLOCK_D // 2], out.dtype.element_ty)
        tl.store(at_out, zeros, mask=in_out)
        tl.store(at_out + HALF, zeros, mask=in_out)
        return
    at_q = q + number[:, None] * stride_q_token + head * stride_q_head + d_range[None, :]
    query = tl.load(at_q, mask=in_out, other=0.0)
    query_high = tl.load(at_q + HALF, mask=in_out, other=0.0)
    position, earliest = context_len + first + m_range, context_len + first
    end = context_len + tl.minimum(first + BLOCK_M, query_len)
    num_rounded = (end - 1) // BLOCK_SIZE  # blocks of the cache that are read
    if TREE:
        sees = tl.load(ancestors + token + first + m_range, mask=in_row, other=0)
        # Two words, as in flash_attention.py.
        low_bits, high_bits = sees.to(tl.uint32), (sees >> 32).to(tl.uint32)
        in_tree = tl.load(ancestors + token) != 0
        position = tl.where(in_tree, context_len + _num_bits(low_bits) + _num_bits(high_bits) - 1, position)
        earliest = tl.where(in_tree, context_len, earliest)
        num_rounded = tl.where(in_tree, (context_len + 1) // BLOCK_SIZE, num_rounded)
    own = position // BLOCK_SIZE * BLOCK_SIZE  # where each query's block begins
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(earliest - WINDOW + 1, 0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)
    acc_high = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)

    # Full blocks, counted in pieces.
    PIECES: tl.constexpr = (BLOCK_SIZE + PIECE - 1) // PIECE  # of a block
    TILE: tl.constexpr = BLOCK_N // PIECE
    num_pieces = num_rounded * PIECES
    for p in range(oldest // BLOCK_SIZE * PIECES + oldest % BLOCK_SIZE // PIECE, num_pieces, TILE):
        of_key, of_piece = p + n_range // PIECE, p + tl.arange(0, TILE)
        slot = of_key % PIECES * PIECE + n_range % PIECE
        key_pos = of_key // PIECES * BLOCK_SIZE + slot
        exists = (of_key < num_pieces) & (slot < BLOCK_SIZE) & (key_pos >= oldest)
        there = (of_piece < num_pieces)[:, None] & in_half[None, :]
        at_table = block_table + row * stride_table
        block = tl.load(at_table + of_key // PIECES, mask=exists, other=0).to(tl.int64)
        block_of_piece = tl.load(at_table + of_piece // PIECES, mask=of_piece < num_pieces, other=0).to(tl.int64)
        at = (block_of_piece * KV_HEADS + kv_head)[:, None] * (2 * HEAD_DIM) + d_range[None, :]
        scale_low = tl.load(key_scale + at, mask=there, other=0.0)  # [pieces, D / 2]
        scale_high = tl.load(key_scale + at + HALF, mask=there, other=0.0)
        lowest_low = tl.load(key_scale + at + HEAD_DIM, mask=there, other=0.0)
        lowest_high = tl.load(key_scale + at + HEAD_DIM + HALF, mask=there, other=0.0)
        at = ((block * BLOCK_SIZE + slot) * KV_HEADS + kv_head)[:, None] * HALF + d_range[None, :]
        key, key_high = halves(tl.load(keys + at, mask=exists[:, None] & in_half[None, :], other=0), query.dtype)
        key = by_channel(key, scale_low, lowest_low, PIECE, query.dtype)
        key_high = by_channel(key_high, scale_high, lowest_high, PIECE, query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        score = tl.dot(query_high, tl.trans(key_high), score, input_precision=PRECISION) * scale
        visible = exists[None, :] & (key_pos[None, :] < own[:, None])
        if WINDOW:
            visible &= key_pos[None, :] > position[:, None] - WINDOW
        value, value_high = halves(tl.load(values + at, mask=exists[:, None] & in_half[None, :], other=0), query.dtype)
        at = (block * 2 * KV_HEADS + kv_head) * BLOCK_SIZE + slot
        scale_of_value = tl.load(value_scale + at, mask=exists, other=1.0).to(tl.float32)
        lowest = tl.load(value_scale + at + KV_HEADS * BLOCK_SIZE, mask=exists, other=0.0).to(tl.float32)
        largest, total, acc, acc_high = _seen(
            score, visible, value, value_high, scale_of_value, lowest, largest, total, acc, acc_high, softcap,
            SOFTCAP, PRECISION,
        )  # fmt: skip

    # Tokens as they are. Those of the step begin at the place context_len.
    RING: tl.constexpr = OPEN_BLOCKS * BLOCK_SIZE
    ring = tl.load(seats + row).to(tl.int64) * RING
    for n in range(tl.maximum(earliest // BLOCK_SIZE * BLOCK_SIZE, oldest), end, BLOCK_N):
        key_pos = n + n_range
        inside, is_old = (key_pos < end)[:, None] & in_half[None, :], (key_pos < context_len)[:, None]
        at = ((ring + key_pos % RING) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d_range[None, :]
        new = (token + key_pos - context_len).to(tl.int64)[:, None]
        at_k = new * stride_k_token + kv_head * stride_k_head + d_range[None, :]
        key = either(open_keys, k, at, at_k, is_old, inside)
        key_high = either(open_keys, k, at + HALF, at_k + HALF, is_old, inside)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        score = tl.dot(query_high, tl.trans(key_high), score, input_precision=PRECISION) * scale
        shown = True
        if TREE:
            nth = key_pos - context_len
            guessed = in_tree & (nth >= 0) & (key_pos < end)
            nth = tl.minimum(tl.maximum(nth, 0), 63)
            path = tl.load(ancestors + token + nth, mask=guessed, other=0)
            depth = _num_bits(path.to(tl.uint32)) + _num_bits((path >> 32).to(tl.uint32)) - 1
            key_pos = tl.where(guessed, context_len + depth, key_pos)
            bits = tl.where((nth < 32)[None, :], low_bits[:, None], high_bits[:, None])
            shown = ((bits >> (nth & 31).to(tl.uint32)[None, :]) & 1 == 1) | ~guessed[None, :]
        visible = (key_pos[None, :] >= own[:, None]) & (key_pos[None, :] <= position[:, None]) & shown
        if WINDOW:
            visible &= key_pos[None, :] > position[:, None] - WINDOW
        at_v = new * stride_v_token + kv_head * stride_v_head + d_range[None, :]
        value = either(open_values, v, at, at_v, is_old, inside)
        value_high = either(open_values, v, at + HALF, at_v + HALF, is_old, inside)
        one, none = tl.full([BLOCK_N], 1.0, tl.float32), tl.zeros([BLOCK_N], tl.float32)
        largest, total, acc, acc_high = _seen(
            score, visible, value, value_high, one, none, largest, total, acc, acc_high, softcap, SOFTCAP, PRECISION
        )

    if TREE:  # the blocks that guesses have filled, each once for its path
        for guess in range(1, tl.where(in_tree, end - context_len, 0)):
            path = tl.load(ancestors + token + guess)
            path_low, path_high = path.to(tl.uint32), (path >> 32).to(tl.uint32)
            block_end = context_len + _num_bits(path_low) + _num_bits(path_high)
            if block_end % BLOCK_SIZE == 0:
                begin = block_end - BLOCK_SIZE
                least = tl.full([BLOCK_D // 2], float("inf"), tl.float32)
                least_high, most, most_high = least, -least, -least
                for s in range(0, BLOCK_SIZE, BLOCK_N):  # what a channel's scale follows from
                    key_pos, in_block = begin + s + n_range, (s + n_range < BLOCK_SIZE)[:, None]
                    inside, is_old = in_block & in_half[None, :], (key_pos < context_len)[:, None]
                    at = ((ring + key_pos % RING) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d_range[None, :]
                    new = _nth_bit(path_low, path_high, tl.maximum(key_pos - context_len, 0))
                    new = (token + tl.minimum(new, guess)).to(tl.int64)[:, None]
                    at_k = new * stride_k_token + kv_head * stride_k_head + d_range[None, :]
                    key = either(open_keys, k, at, at_k, is_old, inside).to(tl.float32)
                    key_high = either(open_keys, k, at + HALF, at_k + HALF, is_old, inside).to(tl.float32)
                    least = tl.minimum(least, tl.min(tl.where(in_block, key, float("inf")), 0))
                    least_high = tl.minimum(least_high, tl.min(tl.where(in_block, key_high, float("inf")), 0))
                    most = tl.maximum(most, tl.max(tl.where(in_block, key, float("-inf")), 0))
                    most_high = tl.maximum(most_high, tl.max(tl.where(in_block, key_high, float("-inf")), 0))
                least, least_high = least.to(tl.float16).to(tl.float32), least_high.to(tl.float16).to(tl.float32)
                step, step_high = _scale_of(most - least), _scale_of(most_high - least_high)
                bits = low_bits >> guess if guess < 32 else high_bits >> guess - 32
                beyond = (bits & 1 == 1) & (first + m_range != guess)
                for s in range(0, BLOCK_SIZE, BLOCK_N):
                    key_pos, in_block = begin + s + n_range, s + n_range < BLOCK_SIZE
                    inside, is_old = in_block[:, None] & in_half[None, :], (key_pos < context_len)[:, None]
                    at = ((ring + key_pos % RING) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d_range[None, :]
                    new = _nth_bit(path_low, path_high, tl.maximum(key_pos - context_len, 0))
                    new = (token + tl.minimum(new, guess)).to(tl.int64)[:, None]
                    at_k = new * stride_k_token + kv_head * stride_k_head + d_range[None, :]
                    key = either(open_keys, k, at, at_k, is_old, inside).to(tl.float32) - least[None, :]
                    key = (_codes(key, step[None, :]).to(tl.float32) * step[None, :] + least[None, :]).to(query.dtype)
                    score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
                    key = either(open_keys, k, at + HALF, at_k + HALF, is_old, inside).to(tl.float32)
                    key = _codes(key - least_high[None, :], step_high[None, :]).to(tl.float32)
                    key = (key * step_high[None, :] + least_high[None, :]).to(query.dtype)
                    score = tl.dot(query_high, tl.trans(key), score, input_precision=PRECISION) * scale
                    visible = in_block[None, :] & beyond[:, None]
                    if WINDOW:
                        visible &= key_pos[None, :] > position[:, None] - WINDOW
                    at_v = new * stride_v_token + kv_head * stride_v_head + d_range[None, :]
                    value = either(open_values, v, at, at_v, is_old, inside).to(tl.float32)
                    value_high = either(open_values, v, at + HALF, at_v + HALF, is_old, inside).to(tl.float32)
                    lowest = tl.min(tl.where(in_half[None, :], tl.minimum(value, value_high), float("inf")), 1)
                    lowest = lowest.to(tl.float16).to(tl.float32)
                    value, value_high = value - lowest[:, None], value_high - lowest[:, None]
                    highest = tl.where(in_half[None, :], tl.maximum(value, value_high), float("-inf"))
                    scale_of_value = _scale_of(tl.max(highest, 1))
                    value = _codes(value, scale_of_value[:, None]).to(query.dtype)
                    value_high = _codes(value_high, scale_of_value[:, None]).to(query.dtype)
                    largest, total, acc, acc_high = _seen(
                        score, visible, value, value_high, scale_of_value, lowest, largest, total, acc, acc_high,
                        softcap, SOFTCAP, PRECISION,
                    )  # fmt: skip

    total = tl.where(in_row, total, 1.0)  # a tile may have fewer queries than places
    tl.store(at_out, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_out)
    tl.store(at_out + HALF, (acc_high / total[:, None]).to(out.dtype.element_ty), mask=in_out)


def flash_by_channel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: ByChannel,
    seats: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Twin of `reference.flash_by_channel`, which documents shapes and meanings. ValueError for memory that is laid out
    otherwise."""
    check_memory(cache, q, k, v)
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = cache.keys.shape
    num_rows, out = len(seq_lens), torch.empty_like(q)
    tile, options = tile_of(head_dim, q.element_size(), architecture(), ancestors is not None)
    launch(
        _flash_by_channel, (num_heads, num_tokens // tile["BLOCK_M"] + num_rows),
        q, k, v, *cache[:6], out, seats, block_table, query_start_loc, seq_lens, ancestors,
        num_rows, scale, 1.0 if softcap is None else softcap,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        block_table.stride(0),
        GROUP=num_heads // num_kv_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        PIECE=piece_of(block_size, tile["BLOCK_N"]), OPEN_BLOCKS=cache.open_blocks,
        WINDOW=window or 0, SOFTCAP=softcap is not None, TREE=ancestors is not None,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32", options=options, **tile,
    )  # fmt: skip
    return out


def tile_of(
    head_dim: int, element_size: int, gpu: Architecture, tree: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """That of a cache of 4 bits in flash_attention.py; a smaller one, or in more warps, where it would spill."""
    tile, options = tile_of_flash(head_dim, element_size, gpu, tree, packed=True)
    if element_size == 4 or tile["BLOCK_D"] <= 64:
        return tile, options
    if tile["BLOCK_D"] > 128 and gpu.name != "sm_90":
        eight = tree and gpu.target.backend == "cuda"
        return tile | {"BLOCK_M": 32, "BLOCK_N": 16}, options | {"num_warps": 8 if eight else 4}
    if tree and gpu.name == "sm_100":
        return tile | {"BLOCK_M": 32}, options
    if not gpu.is_large:
        return tile | {"BLOCK_N": 16}, options | {"num_warps": 8}
    return tile, options
