"""Low-rank adapters of a ragged batch: every token adds B[adapter] (scale x A[adapter] x) to a layer's output.

Two launches for all tokens and adapters (LoRA, Hu et al. 2021; batched as in Punica, Chen et al. 2023, and S-LoRA,
Sheng et al. 2023): shrink to `rank` values, expand and add. Tokens lie in any order. A program owns a tile of BLOCK_M
tokens and a share of the adapters that occur there: the n-th of them belongs to lane n % LANES. It multiplies the
whole tile by that adapter's matrix and keeps the rows of the adapter's own tokens. So a run of one adapter's tokens (a
prompt) costs one product per tile, tokens that all differ (decoding) are spread over the lanes, and an adapter's matrix
is read once per tile in which it occurs. Every value is written by one program: no atomics, and no order that varies.

FLOPs: 2 x tokens x rank x (in + out). Bytes, of values: tokens x (in + 2 out) for x and for the output read and
written, rank x (in + out) for each adapter and tile; while decoding, the latter dominates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.launch import architecture, launch

LANES = 16  # programs that share the adapters of a tile; those that get none return at once
MAX_DECODE_TOKENS = 1024  # up to here tiles are small


@triton.jit
def _numbered(adapter, m_range):
    """Numbers the tile's adapters as they occur: their number at each one's first token, -1 elsewhere; how many."""
    before = (adapter[:, None] == adapter[None, :]) & (m_range[None, :] < m_range[:, None])
    first = (tl.sum(before.to(tl.int32), 1) == 0) & (adapter >= 0)
    number = tl.cumsum(first.to(tl.int32), 0) - 1
    return tl.where(first, number, -1), tl.sum(first.to(tl.int32))


@triton.jit(do_not_specialize=["num_tokens"])
def _lora_shrink(
    x, a, adapter_index, h,
    num_tokens, in_features, rank, scale,
    stride_x, stride_a_adapter, stride_a_rank, stride_h,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1)
    m_range, k_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    token = tl.program_id(2) * BLOCK_M + m_range
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rank = r < rank
    adapter = tl.load(adapter_index + token, mask=token < num_tokens, other=-1)
    number, count = _numbered(adapter, m_range)
    at_h = h + token[:, None] * stride_h + r[None, :]
    if lane == 0:
        has_none = (adapter < 0) & (token < num_tokens)
        zeros = tl.zeros([BLOCK_M, BLOCK_R], h.dtype.element_ty)
        tl.store(at_h, zeros, mask=has_none[:, None] & in_rank[None, :])
    for n in range(lane, count, LANES):
        current = tl.sum(tl.where(number == n, adapter, 0))
        mine = adapter == current
        at_x = x + token.to(tl.int64)[:, None] * stride_x + k_range[None, :]
        at_a = a + current.to(tl.int64) * stride_a_adapter + r[None, :] * stride_a_rank + k_range[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for k in range(0, in_features, BLOCK_K):
            in_k = k_range < in_features - k
            rows = tl.load(at_x + k, mask=mine[:, None] & in_k[None, :], other=0.0)
            down = tl.load(at_a + k, mask=in_k[:, None] & in_rank[None, :], other=0.0)
            acc = tl.dot(rows, down, acc, input_precision=PRECISION)
        tl.store(at_h, (acc * scale).to(h.dtype.element_ty), mask=mine[:, None] & in_rank[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _lora_expand(
    h, b, adapter_index, out,
    num_tokens, out_features, rank,
    stride_h, stride_b_adapter, stride_b_out, stride_out,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1)
    m_range, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    token = tl.program_id(2) * BLOCK_M + m_range
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_out, in_rank = feature < out_features, r < rank
    adapter = tl.load(adapter_index + token, mask=token < num_tokens, other=-1)
    number, count = _numbered(adapter, m_range)
    at_out = out + token.to(tl.int64)[None, :] * stride_out + feature[:, None]
    for n in range(lane, count, LANES):
        current = tl.sum(tl.where(number == n, adapter, 0))
        mine = adapter == current
        # Transposed, so that the features are the large side of the matrix instruction and the tokens its small one.
        at_b = b + current.to(tl.int64) * stride_b_adapter + feature[:, None] * stride_b_out + r[None, :]
        up = tl.load(at_b, mask=in_out[:, None] & in_rank[None, :], other=0.0)
        low = tl.load(h + token[None, :] * stride_h + r[:, None], mask=mine[None, :] & in_rank[:, None], other=0.0)
        stored = mine[None, :] & in_out[:, None]
        old = tl.load(at_out, mask=stored, other=0.0).to(tl.float32)
        new = old + tl.dot(up, low, input_precision=PRECISION)
        tl.store(at_out, new.to(out.dtype.element_ty), mask=stored)


def lora_shrink(x: Tensor, a: Tensor, adapter_index: Tensor, scale: float = 1.0) -> Tensor:
    """Twin of `reference.lora_shrink`, which documents shapes and meanings."""
    num_tokens, in_features = x.shape
    rank = a.shape[1]
    if x.stride(1) != 1 or a.stride(2) != 1 or a.shape[2] != in_features:
        raise ValueError(f"expected x [tokens, in] and a [adapters, rank, in], `in` contiguous: {_seen(x, a)}")
    h = x.new_empty(num_tokens, rank)
    tile, options = shrink_tile_of(num_tokens, rank, x.element_size(), architecture())
    launch(
        _lora_shrink, (-(-rank // tile["BLOCK_R"]), LANES, -(-num_tokens // tile["BLOCK_M"])),
        x, a, adapter_index, h, num_tokens, in_features, rank, scale, x.stride(0), *a.stride()[:2], h.stride(0),
        LANES=LANES, PRECISION="ieee" if x.dtype is torch.float32 else "tf32", options=options, **tile,
    )  # fmt: skip
    return h


def lora_expand(h: Tensor, b: Tensor, adapter_index: Tensor, out: Tensor) -> Tensor:
    """Twin of `reference.lora_expand`, which documents shapes and meanings."""
    num_tokens, rank = h.shape
    out_features = b.shape[1]
    if h.stride(1) != 1 or b.stride(2) != 1 or out.stride(1) != 1 or out.shape != (num_tokens, out_features):
        raise ValueError(
            "expected h [tokens, rank], b [adapters, out, rank] and out [tokens, out], the last dimension contiguous: "
            + _seen(h, b, out)
        )
    tile, options = expand_tile_of(num_tokens, rank, h.element_size())
    launch(
        _lora_expand, (-(-out_features // tile["BLOCK_N"]), LANES, -(-num_tokens // tile["BLOCK_M"])),
        h, b, adapter_index, out, num_tokens, out_features, rank, h.stride(0), *b.stride()[:2], out.stride(0),
        LANES=LANES, PRECISION="ieee" if h.dtype is torch.float32 else "tf32", options=options, **tile,
    )  # fmt: skip
    return out


def _seen(*tensors: Tensor) -> str:
    return "got " + ", ".join(f"{list(t.shape)} with strides {t.stride()}" for t in tensors)


def shrink_tile_of(
    num_tokens: int, rank: int, element_size: int, gpu: Architecture
) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options. Decoding: 16 ranks a program, so more programs read. Prompts: up to 64, so x is read once."""
    decodes = num_tokens <= MAX_DECODE_TOKENS
    if element_size == 4:
        return {"BLOCK_M": 16, "BLOCK_R": 16, "BLOCK_K": 64}, {"num_warps": 4, "num_stages": 1}
    block_m, block_k = (16, 256) if decodes else (64, 128)
    block_r = 16 if decodes else min(64, max(16, triton.next_power_of_2(rank)))
    stages = min(3, gpu.shared_bytes // ((block_m + block_r) * block_k * element_size))
    return {"BLOCK_M": block_m, "BLOCK_R": block_r, "BLOCK_K": block_k}, {"num_warps": 4, "num_stages": stages}


def expand_tile_of(num_tokens: int, rank: int, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    block_m, block_n = (16, 128) if num_tokens <= MAX_DECODE_TOKENS else (64, 128)
    if element_size == 4:
        block_m, block_n = 16, 16
    tile = {"BLOCK_M": block_m, "BLOCK_R": max(16, triton.next_power_of_2(rank)), "BLOCK_N": block_n}
    return tile, {"num_warps": 4, "num_stages": 1}
