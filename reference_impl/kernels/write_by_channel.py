"""Writes a step's keys and values into a cache by channel (KIVI, Liu et al. 2024): as they are beside the pool, and in
4 bits where a block is full.

A program has one token and one KV head. If the token is the last of its block (rounds), it reads the block's tokens,
those before the step from the open ones, and rounds them: keys by channel over the block, values by token. Then
(keeps) it puts its own token among the open ones.

Bytes per token and head, of b bytes a number: 4 head_dim b to copy keys and values; at a block's end once more
2 block_size head_dim b are read and (block_size + 4) head_dim + 4 block_size bytes written. Memory-bound.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.by_channel import check_memory, either, row_of_token
from reference_impl.kernels.launch import launch, wait_for_previous
from reference_impl.kernels.reference.by_channel import ByChannel


@triton.jit
def _scale_of(largest):
    """16 bits of it, as float32: twin of `reference.to_four_bits`."""
    return tl.maximum(tl.div_rn(largest, 15.0).to(tl.float16).to(tl.float32), 5.960464477539063e-08)  # 2^-24


@triton.jit
def _codes(above, scale):
    """Adding and taking away 1.5 x 2^23 rounds to the nearest whole number, ties to the even one."""
    return tl.clamp((above * tl.div_rn(1.0, scale) + 12582912.0) - 12582912.0, 0.0, 15.0).to(tl.int32)


@triton.jit
def _round_keys(
    k, open_keys, keys, key_scale, at_k, stride_k_token, block, head, begin, start, ring,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, RING: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Of one block and head, by channel. at_k: of the block's last token; before `start` tokens are open ones."""
    s_range = tl.arange(0, BLOCK_S)
    at_open = (((ring + (begin + s_range) % RING) * KV_HEADS + head) * (2 * HALF))[:, None]
    at_new = (at_k + (s_range - (BLOCK_SIZE - 1)) * stride_k_token)[:, None]
    is_old, in_block = (begin + s_range < start)[:, None], (s_range < BLOCK_SIZE)[:, None]
    at_codes = (((block * BLOCK_SIZE + s_range) * KV_HEADS + head) * HALF)[:, None]
    at_scale = key_scale + (block * KV_HEADS + head) * 4 * HALF
    for c in range(0, HALF, BLOCK_C):
        column = c + tl.arange(0, BLOCK_C)
        in_half = column < HALF
        inside = in_block & in_half[None, :]
        byte = tl.zeros([BLOCK_S, BLOCK_C], tl.int32)
        for half in tl.static_range(2):  # the low half of a byte, then its high one
            of_head = column + half * HALF
            at_column = of_head[None, :]
            x = either(open_keys, k, at_open + at_column, at_new + at_column, is_old, inside).to(tl.float32)
            lowest = tl.min(tl.where(in_block, x, float("inf")), 0).to(tl.float16)
            above = x - lowest.to(tl.float32)[None, :]
            scale = _scale_of(tl.max(tl.where(in_block, above, float("-inf")), 0))
            tl.store(at_scale + of_head, scale.to(tl.float16), mask=in_half)
            tl.store(at_scale + 2 * HALF + of_head, lowest, mask=in_half)
            byte |= _codes(above, scale[None, :]) << (4 * half)
        tl.store(keys + at_codes + column[None, :], byte.to(tl.uint8), mask=inside)


@triton.jit
def _round_values(
    v, open_values, values, value_scale, at_v, stride_v_token, block, head, begin, start, ring,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, RING: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Of one block and head, by token."""
    column = tl.arange(0, BLOCK_HALF)
    in_half = (column < HALF)[None, :]
    for t in range(0, BLOCK_SIZE, BLOCK_T):
        slot = t + tl.arange(0, BLOCK_T)
        in_block, is_old = slot < BLOCK_SIZE, (begin + slot < start)[:, None]
        inside = in_block[:, None] & in_half
        at_open = ((ring + (begin + slot) % RING) * KV_HEADS + head)[:, None] * (2 * HALF) + column[None, :]
        at_new = at_v + (slot - (BLOCK_SIZE - 1))[:, None] * stride_v_token + column[None, :]
        a = either(open_values, v, at_open, at_new, is_old, inside).to(tl.float32)
        b = either(open_values, v, at_open + HALF, at_new + HALF, is_old, inside).to(tl.float32)
        lowest = tl.min(tl.where(in_half, tl.minimum(a, b), float("inf")), 1).to(tl.float16)
        a, b = a - lowest.to(tl.float32)[:, None], b - lowest.to(tl.float32)[:, None]
        scale = _scale_of(tl.max(tl.where(in_half, tl.maximum(a, b), float("-inf")), 1))
        at_scale = value_scale + (block * 2 * KV_HEADS + head) * BLOCK_SIZE + slot
        tl.store(at_scale, scale.to(tl.float16), mask=in_block)
        tl.store(at_scale + KV_HEADS * BLOCK_SIZE, lowest, mask=in_block)
        byte = _codes(a, scale[:, None]) | _codes(b, scale[:, None]) << 4
        at_codes = ((block * BLOCK_SIZE + slot) * KV_HEADS + head)[:, None] * HALF + column[None, :]
        tl.store(values + at_codes, byte.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _write_by_channel(
    k, v, keys, values, key_scale, value_scale, open_keys, open_values,
    seats, slot_mapping, query_start_loc, seq_lens,
    num_rows, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, OPEN_BLOCKS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr,
    ROUNDS: tl.constexpr, KEEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    token, head = tl.program_id(0), tl.program_id(1)
    row = row_of_token(query_start_loc, num_rows, token)
    first, end = tl.load(query_start_loc + row), tl.load(seq_lens + row)
    start = end - (tl.load(query_start_loc + row + 1) - first)
    if start < 0:  # a row of length 0 pads the batch
        return
    RING: tl.constexpr = OPEN_BLOCKS * BLOCK_SIZE
    position = start + token - first
    ring = tl.load(seats + row).to(tl.int64) * RING
    at_k = token.to(tl.int64) * stride_k_token + head * stride_k_head
    at_v = token.to(tl.int64) * stride_v_token + head * stride_v_head
    if ROUNDS:
        is_last = position % BLOCK_SIZE == BLOCK_SIZE - 1
        if is_last:
            block, begin = tl.load(slot_mapping + token).to(tl.int64) // BLOCK_SIZE, position - (BLOCK_SIZE - 1)
            _round_keys(
                k, open_keys, keys, key_scale, at_k, stride_k_token, block, head, begin, start, ring,
                KV_HEADS, HALF, BLOCK_SIZE, RING, BLOCK_S, BLOCK_C,
            )  # fmt: skip
            _round_values(
                v, open_values, values, value_scale, at_v, stride_v_token, block, head, begin, start, ring,
                KV_HEADS, HALF, BLOCK_SIZE, RING, BLOCK_T, BLOCK_HALF,
            )  # fmt: skip
    if KEEPS:
        column = tl.arange(0, 2 * BLOCK_HALF)
        stays = position >= ((end - 1) // BLOCK_SIZE - (OPEN_BLOCKS - 1)) * BLOCK_SIZE
        kept = stays & (column < 2 * HALF)
        at_open = ((ring + position % RING) * KV_HEADS + head) * (2 * HALF) + column
        tl.store(open_keys + at_open, tl.load(k + at_k + column, mask=kept), mask=kept)
        tl.store(open_values + at_open, tl.load(v + at_v + column, mask=kept), mask=kept)


def write_by_channel(
    k: Tensor,
    v: Tensor,
    cache: ByChannel,
    seats: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    rounds: bool = True,
    keeps: bool = True,
) -> None:
    """Twin of `reference.write_by_channel`, which documents shapes and meanings.

    Rounding and keeping may be one launch where no row goes on for more than its open blocks: there no new token takes
    the place of one that this step reads. ValueError for memory that is laid out otherwise.
    """
    check_memory(cache, k, v)
    num_tokens, kv_heads, head_dim = k.shape
    block_size = cache.keys.shape[1]
    tile, options = tile_of(head_dim, block_size)
    launch(
        _write_by_channel, (num_tokens, kv_heads),
        k, v, *cache[:6], seats, slot_mapping, query_start_loc, seq_lens,
        len(seq_lens), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KV_HEADS=kv_heads, HALF=head_dim // 2, BLOCK_SIZE=block_size, OPEN_BLOCKS=cache.open_blocks,
        ROUNDS=rounds, KEEPS=keeps, options=options, **tile,
    )  # fmt: skip


def tile_of(head_dim: int, block_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options: about 512 pairs at a time, 4 per thread of four warps, on every GPU."""
    block_s, block_half = triton.next_power_of_2(block_size), triton.next_power_of_2(head_dim // 2)
    tile = {
        "BLOCK_S": block_s, "BLOCK_C": min(max(512 // block_s, 1), block_half),
        "BLOCK_T": min(max(512 // block_half, 1), block_s), "BLOCK_HALF": block_half,
    }  # fmt: skip
    return tile, {"num_warps": 4}
