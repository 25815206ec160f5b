"""Attention in plain torch.

Shapes: q [num_tokens, num_heads, head_dim]; keys and values [num_slots, num_kv_heads, head_dim], a layer's
cache seen as a list of slots. Query head h reads KV head h // (num_heads // num_kv_heads).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.kernels.reference.rows import soft_cap


def context_slots(block_table: Tensor, seq_len: int, block_size: int) -> Tensor:
    """Slots of one row's tokens in order: block_table [max_blocks] -> [seq_len] int64."""
    blocks = block_table[: -(-seq_len // block_size)].long()
    slots = blocks[:, None] * block_size + torch.arange(block_size, device=block_table.device)
    return slots.flatten()[:seq_len]


def causal_mask(query_len: int, seq_len: int, device: torch.device, window: int | None = None) -> Tensor:
    """[query_len, seq_len] bool, true where a query may look: at position p it sees p - window + 1 ... p.

    Aligned bottom-right: the last query sees the last key. `is_causal=True` of scaled_dot_product_attention
    aligns top-left, which is wrong as soon as the cache already holds tokens.
    """
    query = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key = torch.arange(seq_len, device=device)[None]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def attention_one_row(
    q: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Queries of one sequence over its context, causal. The last key is that of the last query.

    q [query_len, num_heads, head_dim], key and value [seq_len, num_kv_heads, head_dim] -> like q.
    With a window, leading keys that no query sees may be left out.
    """
    query_len, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = key.shape
    if window is not None and window >= seq_len:
        window = None  # it masks nothing
    k, v = (
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
    )  # [1, num_kv_heads, seq_len, head_dim]
    if query_len == 1 and window is None:  # it sees everything: no mask, and a group of heads shares one read of k
        grouped = q.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return _attend(grouped, k, v, None, scale, softcap).view(1, num_heads, head_dim)
    heads = q.transpose(0, 1)[None]
    if query_len == seq_len and window is None and softcap is None:
        gqa = num_heads != num_kv_heads
        out = F.scaled_dot_product_attention(heads, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    else:
        out = _attend(heads, k, v, causal_mask(query_len, seq_len, q.device, window), scale, softcap)
    return out[0].transpose(0, 1)


def attention_decode_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    mask: Tensor,
    scale: float,
    workspace: Tensor,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """One query per row, all rows at once, padded to the longest context.

    q [rows, num_heads, head_dim]; slots [rows, max_seq_len], where the padding repeats a slot of the same row:
    a slot never written may hold NaN, and 0 x NaN is NaN. mask [rows, 1, 1, max_seq_len]: 0, or -inf for padding.
    workspace [2, rows * max_seq_len or more, num_kv_heads, head_dim], like q: is overwritten with the gathered
    context. keys, values and their scales as in `flash_attention`.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    flat = slots.flatten()
    k, v = (
        stored(cache, flat, scales, room[: len(flat)]).view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
        for cache, scales, room in zip((keys, values), (key_scale, value_scale), workspace, strict=True)
    )  # [rows, num_kv_heads, max_seq_len, head_dim]
    # The query heads of a group read the same keys, so they can take the place of several queries.
    grouped = q.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return _attend(grouped, k, v, mask, scale, softcap).view(rows, num_heads, head_dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """softmax(cap(q k^T x scale) + mask) v, where a softcap is given (Gemma 2).

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
    """Ragged queries over a paged cache, causal; row r owns queries [query_start_loc[r], query_start_loc[r + 1]).

    q [num_tokens, num_heads, head_dim]; keys and values [num_blocks, block_size, num_kv_heads, head_dim];
    block_table [num_rows, max_blocks] int32; query_start_loc [num_rows + 1] and seq_lens [num_rows] int32.
    key_scale, value_scale [num_blocks, block_size, num_kv_heads] float32: factors of the stored keys and values (a
    cache of 8 bits). ancestors [num_tokens] int64: a tree of at most 64 drafts; bit i is set if the query sees the i-th
    of its row's own tokens, itself included. skip_threshold: what the kernel may leave out; nothing is left out here.
    A row with seq_len 0 only pads the batch: its queries give zeros.
    """
    out = torch.empty_like(q)
    for row, seq_len in enumerate(seq_lens.tolist()):
        first, end = query_start_loc[row : row + 2].tolist()
        if seq_len == 0:
            out[first:end] = 0
            continue
        slots = context_slots(block_table[row], seq_len, keys.shape[1])
        k, v = (
            stored(cache, slots, scales, q.new_empty(seq_len, *cache.shape[2:]))
            for cache, scales in ((keys, key_scale), (values, value_scale))
        )
        if ancestors is None:
            out[first:end] = attention_one_row(q[first:end], k, v, scale, window, softcap)
        else:
            mask = tree_mask(ancestors[first:end], seq_len, window)
            query, key, value = (t.transpose(0, 1)[None] for t in (q[first:end], k, v))
            out[first:end] = _attend(query, key, value, mask, scale, softcap)[0].transpose(0, 1)
    return out


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
    """One query per row, q [num_rows, num_heads, head_dim]; the rest as in `flash_attention`.

    max_seq_len: a bound of seq_lens on the host. A row with seq_len 0 only pads the batch: it gives zeros.
    """
    start = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    real = seq_lens > 0
    rows, lengths = start[:-1][real].long(), seq_lens[real]
    out = torch.zeros_like(q)
    out[rows] = flash_attention(
        q[rows], keys, values, block_table[rows], start[: len(rows) + 1], lengths, scale,
        window=window, softcap=softcap, key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip
    return out


def merge_splits(means: Tensor, lse: Tensor) -> Tensor:
    """Attention over a context, merged from its parts: means [splits, ..., head_dim], lse [splits, ...] -> [...,
    head_dim]. lse: log2 of the sum of 2^score (base 2 throughout); -inf for an empty part, whose mean is not read.
    """
    weight = torch.exp2(lse - lse.amax(0).nan_to_num(neginf=0.0))
    return (weight[..., None] * means.masked_fill((weight == 0)[..., None], 0)).sum(0) / weight.sum(0)[..., None]


def tree_mask(ancestors: Tensor, seq_len: int, window: int | None = None) -> Tensor:
    """[len(ancestors), seq_len] bool: a draft sees the context, and those drafts whose bit is set in its mask."""
    num_drafts = len(ancestors)
    drafts = (ancestors[:, None] >> torch.arange(num_drafts, device=ancestors.device)) & 1
    mask = causal_mask(num_drafts, seq_len, ancestors.device, window)
    mask[:, seq_len - num_drafts :] &= drafts.bool()
    return mask


def stored(cache: Tensor, slots: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    """Reads these slots: fills and returns out [len(slots), num_kv_heads, head_dim], in its dtype.

    cache and scale as in `flash_attention`; out is like the cache where there is no scale.
    """
    if scale is None:
        return torch.index_select(cache.flatten(0, 1), 0, slots, out=out)
    # As bytes: torch has no index_select of float8 everywhere. Codes of 8 bits are exact in every dtype of `out`, so
    # only the product is rounded.
    codes = cache.view(torch.uint8).flatten(0, 1).index_select(0, slots).view(cache.dtype)
    size = cache.shape[1]
    return out.copy_(codes).mul_(scale[slots // size, slots % size][..., None])
