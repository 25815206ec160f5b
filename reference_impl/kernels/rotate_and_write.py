"""What happens to q, k and v between projection and attention, in one launch: QK-norm, rotary embedding, cache write.

A program has one token and a few heads, of q, or of k and v. It reads a head as two halves (a, b), normalises them (if
the model does), rotates, (a, b) -> (a cos - b sin, b cos + a sin), and stores q in a tensor of its own, k and v in the
cache at the token's slot. In a cache of 8 or 4 bits every head of a slot has a scale of its own; in 4 bits a byte holds
a code of the first half and the code at the same place of the second.

Bytes per token, of b bytes per value: (heads + 2 kv_heads) x head_dim x b are read and as many written (to the cache at
its own width). As separate kernels (norm, rotation, write) q and k are read and written up to twice more. Cosines and
sines, head_dim x 4 bytes per token, stay in the L2. About 10 FLOPs per value: memory-bound.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.eight_bits import DTYPES, encoded, magnitude, scale_of
from reference_impl.kernels.kv_scales import strides_of_scales
from reference_impl.kernels.launch import launch


@triton.jit
def _rotated(x, at, inside, cosine, sine, weight, column, eps, HALF: tl.constexpr):
    """Heads at `at`, normalised and rotated: their halves, [H, D / 2] float32 each."""
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        in_half = column < HALF
        a = a * factor * tl.load(weight + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
        b = b * factor * tl.load(weight + HALF + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    return a * cosine - b * sine, b * cosine + a * sine


@triton.jit
def _store(cache, at, scale, at_scale, stride_lowest, a, b, inside, in_head, HALF: tl.constexpr):
    """Both halves of each head into the cache; with a scale, its largest magnitude becomes the largest code. In 4 bits
    its least number becomes 0, its largest 15: twin of `reference.to_four_bits`."""
    dtype: tl.constexpr = cache.dtype.element_ty
    if dtype == tl.uint8:
        largest = tl.max(tl.maximum(magnitude(a), magnitude(b)), 1)
        fits = largest.to(tl.float32, bitcast=True) < 65520.0  # what is larger, float16 has as infinity
        lowest = tl.min(tl.where(inside, tl.minimum(a, b), float("inf")), 1).to(tl.float16)
        tl.store(scale + at_scale + stride_lowest, lowest, mask=in_head)
        a, b = a - lowest.to(tl.float32)[:, None], b - lowest.to(tl.float32)[:, None]
        highest = tl.max(tl.where(inside, tl.maximum(a, b), 0.0), 1)
        head_scale = tl.div_rn(highest, 15.0).to(tl.float16).to(tl.float32)
        head_scale = tl.maximum(head_scale, 5.960464477539063e-08)  # 2^-24
        tl.store(scale + at_scale, tl.where(fits, head_scale, float("nan")).to(tl.float16), mask=in_head)
        inverse = tl.div_rn(1.0, head_scale)[:, None]
        # Adding and taking away 1.5 x 2^23 rounds to the nearest whole number, ties to the even one.
        a = tl.clamp((a * inverse + 12582912.0) - 12582912.0, 0.0, 15.0)
        b = tl.clamp((b * inverse + 12582912.0) - 12582912.0, 0.0, 15.0)
        tl.store(cache + at, (a.to(tl.int32) | b.to(tl.int32) << 4).to(tl.uint8), mask=inside)
        return
    if scale is not None:
        largest = tl.maximum(tl.max(magnitude(a), 1), tl.max(magnitude(b), 1))
        head_scale = scale_of(largest, dtype)
        inverse = tl.div_rn(1.0, head_scale)[:, None]
        tl.store(scale + at_scale, head_scale, mask=in_head)
        a, b = encoded(a * inverse, dtype), encoded(b * inverse, dtype)
    tl.store(cache + at, a.to(dtype), mask=inside)
    tl.store(cache + at + HALF, b.to(dtype), mask=inside)


@triton.jit
def _rotate_and_write(
    q, k, v, out, positions, cos, sin, keys, values, key_scale, value_scale, slot_mapping,
    q_norm, k_norm, eps,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_cos, stride_block, stride_slot, stride_head,
    stride_scale_block, stride_scale_slot, stride_scale_head, stride_lowest,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK_HALF)
    in_half = column < HALF
    # Both halves of a cosine row are the same, those of a sine row differ in their sign.
    at_row = tl.load(positions + token).to(tl.int64) * stride_cos + column
    cosine = tl.load(cos + at_row, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + at_row + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]

    if tile < tl.cdiv(HEADS, BLOCK_H):
        head = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < HEADS)[:, None] & in_half[None, :]
        at_q = token * stride_q_token + head[:, None] * stride_q_head + column[None, :]
        a, b = _rotated(q, at_q, inside, cosine, sine, q_norm, column, eps, HALF)
        at_out = (token * HEADS + head)[:, None] * (2 * HALF) + column[None, :]
        tl.store(out + at_out, a.to(out.dtype.element_ty), mask=inside)
        tl.store(out + at_out + HALF, b.to(out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:  # a token that only pads the batch is written nowhere
            head = (tile - tl.cdiv(HEADS, BLOCK_H)) * BLOCK_H + tl.arange(0, BLOCK_H)
            in_head = head < KV_HEADS
            inside = in_head[:, None] & in_half[None, :]
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            at = (block * stride_block + offset * stride_slot + head * stride_head)[:, None] + column[None, :]
            at_scale = block * stride_scale_block + offset * stride_scale_slot + head * stride_scale_head
            at_k = token * stride_k_token + head[:, None] * stride_k_head + column[None, :]
            a, b = _rotated(k, at_k, inside, cosine, sine, k_norm, column, eps, HALF)
            _store(keys, at, key_scale, at_scale, stride_lowest, a, b, inside, in_head, HALF)
            at_v = token * stride_v_token + head[:, None] * stride_v_head + column[None, :]
            a = tl.load(v + at_v, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(v + at_v + HALF, mask=inside, other=0.0).to(tl.float32)
            _store(values, at, value_scale, at_scale, stride_lowest, a, b, inside, in_head, HALF)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Twin of `reference.rotate_and_write`, which documents shapes and meanings."""
    num_tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    if keys.stride() != values.stride() or any(t.stride(-1) != 1 for t in (q, k, v, keys, cos, sin)):
        raise ValueError("expected keys and values with the same strides, and head_dim contiguous everywhere")
    strides_of_scale = strides_of_scales(keys, key_scale, value_scale)
    if keys.element_size() == 1 and keys.dtype not in (*DTYPES, torch.uint8):
        known = ", ".join(map(str, DTYPES))
        raise ValueError(f"expected a cache of {known}, uint8 (4 bits) or of wider numbers, got {keys.dtype}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tile, options = tile_of(head_dim)
    tiles = -(-heads // tile["BLOCK_H"]) + -(-kv_heads // tile["BLOCK_H"])
    launch(
        _rotate_and_write, (num_tokens, tiles),
        q, k, v, out, positions, cos, sin, keys, values, key_scale, value_scale, slot_mapping, q_norm, k_norm, eps,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cos.stride(0), *keys.stride()[:3], *strides_of_scale,
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, BLOCK_SIZE=block_size, options=options, **tile,
    )  # fmt: skip
    return out


def tile_of(head_dim: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options: 512 pairs per program, 8 per thread of two warps, on every GPU."""
    block_half = triton.next_power_of_2(head_dim // 2)
    return {"BLOCK_H": max(512 // block_half, 1), "BLOCK_HALF": block_half}, {"num_warps": 2}
