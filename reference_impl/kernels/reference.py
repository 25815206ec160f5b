"""Every kernel in plain torch: the oracle for Triton, and what runs on a CPU.

Shapes: q [num_tokens, num_heads, head_dim]; keys and values [num_slots, num_kv_heads, head_dim], a layer's
cache seen as a list of slots. Query head h reads KV head h // (num_heads // num_kv_heads).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def context_slots(block_table: Tensor, seq_len: int, block_size: int) -> Tensor:
    """Slots of one row's tokens in order: block_table [max_blocks] -> [seq_len] int64."""
    blocks = block_table[: -(-seq_len // block_size)].long()
    slots = blocks[:, None] * block_size + torch.arange(block_size, device=block_table.device)
    return slots.flatten()[:seq_len]


def causal_mask(query_len: int, seq_len: int, device: torch.device) -> Tensor:
    """[query_len, seq_len] bool, true where a query may look.

    Aligned bottom-right: the last query sees everything. `is_causal=True` of scaled_dot_product_attention
    aligns top-left, which is wrong as soon as the cache already holds tokens.
    """
    query_position = torch.arange(seq_len - query_len, seq_len, device=device)
    return torch.arange(seq_len, device=device)[None] <= query_position[:, None]


def attention_one_row(q: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Queries of one sequence over its whole context, causal.

    q [query_len, num_heads, head_dim], key and value [seq_len, num_kv_heads, head_dim] -> like q.
    """
    query_len, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = key.shape
    k, v = (
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
    )  # [1, num_kv_heads, seq_len, head_dim]
    if query_len == 1:  # the last token sees everything: no mask, and a group of heads shares one read of k
        grouped = q.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, scale=scale).view(1, num_heads, head_dim)
    heads = q.transpose(0, 1)[None]
    gqa = num_heads != num_kv_heads
    if query_len == seq_len:
        out = F.scaled_dot_product_attention(heads, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    else:
        mask = causal_mask(query_len, seq_len, q.device)
        out = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return out[0].transpose(0, 1)


def attention_decode_rows(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, mask: Tensor, scale: float, workspace: Tensor
) -> Tensor:
    """One query per row, all rows at once, padded to the longest context.

    q [rows, num_heads, head_dim]; slots [rows, max_seq_len], where the padding repeats a slot of the same row:
    a slot that nobody wrote may hold NaN, and 0 x NaN is NaN. mask [rows, 1, 1, max_seq_len]: 0, or -inf for padding.
    workspace [2, rows * max_seq_len or more, num_kv_heads, head_dim]: is written over with the gathered context.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    flat = slots.flatten()
    k, v = (
        torch.index_select(cache, 0, flat, out=room[: len(flat)]).view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
        for cache, room in zip((keys, values), workspace, strict=True)
    )  # [rows, num_kv_heads, max_seq_len, head_dim]
    # The query heads of a group read the same keys, so they can stand where several queries would.
    grouped = q.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).view(rows, num_heads, head_dim)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention (Su et al. 2021, as Llama and Qwen store it).

    x [num_tokens, heads, head_dim]; cos and sin [num_tokens, 1, head_dim], sin with its first half negated:
    (a, b) -> (a cos - b sin, b cos + a sin).
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (b, a)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's gate: x [..., 2 n] = (gate, up) -> silu(gate) * up, [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
