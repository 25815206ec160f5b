"""Attention in plain torch, and the rotary embedding of the queries and keys that it compares.

Shapes: q [num_tokens, num_heads, head_dim]; keys and values [seq_len, num_kv_heads, head_dim], in the order of the
text. Query head h reads KV head h // (num_heads // num_kv_heads).
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Of fewer keys torch's fused attention on a CPU takes scores that are all NaN for masked ones, and gives 0, unless it
# is given a mask: bad numbers would pass unseen.
FEW_KEYS = 16


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention (Su et al. 2021, as Llama and Qwen store it).

    x [num_tokens, heads, head_dim]; cos and sin [num_tokens, 1, head_dim], sin with its first half negated:
    (a, b) -> (a cos - b sin, b cos + a sin).
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (b, a)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def context_slots(block_table: Tensor, seq_len: int, block_size: int) -> Tensor:
    """Slots of one row's tokens in order: block_table [max_blocks] -> [seq_len] int64."""
    blocks = block_table[: -(-seq_len // block_size)].long()
    slots = blocks[:, None] * block_size + torch.arange(block_size, device=block_table.device)
    return slots.flatten()[:seq_len]


def causal_mask(query_len: int, seq_len: int, device: torch.device, window: int | None = None) -> Tensor:
    """The mask [query_len, seq_len], bool, true where a query may look: at position p it sees p - window + 1 ... p.

    It is aligned bottom-right: the last query sees the last key. `is_causal=True` of scaled_dot_product_attention
    aligns top-left, which is wrong as soon as the cache already holds tokens.
    """
    query = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key = torch.arange(seq_len, device=device)[None]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def attention_one_row(
    q: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Attention of one sequence's queries over its context, causal. The last key is that of the last query.

    q [query_len, num_heads, head_dim], key and value [seq_len, num_kv_heads, head_dim] -> like q.
    With a window, leading keys that no query sees may be left out. On a CPU, NaN or infinity in a key or value has no
    effect on the queries before it.
    """
    query_len, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = key.shape
    if window is not None and window >= seq_len:
        window = None  # it masks nothing
    k, v = key.transpose(0, 1)[None], value.transpose(0, 1)[None]  # [1, num_kv_heads, seq_len, head_dim]
    if query_len == 1 and window is None:  # it sees everything: no mask, and a group of heads shares one read of k
        grouped = q.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        mask = q.new_ones(1, 1, 1, seq_len, dtype=torch.bool) if seq_len < FEW_KEYS else None
        return masked_attention(grouped, k, v, mask, scale, softcap).view(1, num_heads, head_dim)
    heads = q.transpose(0, 1)[None]
    if query_len == seq_len >= FEW_KEYS and window is None and softcap is None:
        gqa = num_heads != num_kv_heads
        out = F.scaled_dot_product_attention(heads, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    else:
        out = masked_attention(heads, k, v, causal_mask(query_len, seq_len, q.device, window), scale, softcap)
    out = out[0].transpose(0, 1)
    if _spoiled(out):
        good = (key.isfinite() & value.isfinite()).flatten(1).all(1)
        before = int(good.cumprod(0).sum())  # the keys before the first bad one; the queries behind it see that one
        if (num := before - (seq_len - query_len)) > 0 and before < seq_len:
            out[:num] = attention_one_row(q[:num], key[:before], value[:before], scale, window, softcap)
    return out


def _spoiled(out: Tensor) -> bool:
    """Whether NaN or infinity in a key or value may have reached queries that do not see it: 0 x NaN is NaN. False on a
    GPU, where the answer would have to be waited for."""
    return not out.is_cuda and not math.isfinite(out.sum(dtype=torch.promote_types(out.dtype, torch.float32)))


def attention_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Attention of rows with equally many queries, all at once, padded to the longest context.

    q [rows, query_len, num_heads, head_dim]; k and v [rows, max_seq_len, num_kv_heads, head_dim], where the padding is
    any number but NaN, since 0 x NaN is NaN. mask [rows, 1, query_len, max_seq_len]: 0, or -inf where a query does not
    look. Several queries of a row on a CPU: as in `attention_one_row`.
    """
    key, value, seen = k, v, mask[:, 0]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [rows, num_kv_heads, max_seq_len, head_dim]
    # The query heads of a group read the same keys, so they take the place of several queries.
    heads = q.unflatten(2, (k.shape[1], -1)).transpose(1, 2)  # [rows, num_kv_heads, query_len, heads in a group, ...]
    if heads.shape[2] > 1:
        mask = mask.repeat_interleave(heads.shape[3], dim=2)
    out = masked_attention(heads.flatten(2, 3), k, v, mask, scale, softcap)
    out = out.view(heads.shape).transpose(1, 2).flatten(2, 3)
    if q.shape[1] > 1 and _spoiled(out):
        for row, i in itertools.product(range(len(q)), range(q.shape[1])):
            k, v = (cache[row, seen[row, i] == 0] for cache in (key, value))
            out[row, i] = attention_one_row(q[row, i, None], k, v, scale, None, softcap)[0]
    return out


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """softmax(cap(q k^T x scale) + mask) v, with `soft_cap` as cap where a softcap is given (Gemma 2).

    q [rows, num_heads, n, head_dim], k and v [rows, num_kv_heads, seq_len, head_dim]; mask bool, or 0 and -inf.
    torch's fused attention has no soft cap, so that case is written out, in float32 or wider.
    """
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.unflatten(1, (k.shape[1], -1)).to(dtype)  # [rows, num_kv_heads, heads in a group, n, head_dim]
    scores = soft_cap(groups @ k[:, :, None].to(dtype).transpose(-1, -2) * scale, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask[:, :, None]
    return (scores.softmax(-1) @ v[:, :, None].to(dtype)).flatten(1, 2).to(q.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap x tanh(x / cap): about x near 0, and never beyond the cap (Gemma 2)."""
    return cap * torch.tanh(x / cap)
