"""The twins of the attention kernels. They read a paged cache of 16 bits, or of 8 or 4 with scales, by block tables."""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.kernels.reference.attention import (
    attention_one_row,
    causal_mask,
    context_slots,
    masked_attention,
)
from reference_impl.kernels.reference.four_bits import from_four_bits


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
    """Causal attention of ragged queries over a paged cache.

    q [num_tokens, num_heads, head_dim]; keys and values [num_blocks, block_size, num_kv_heads, head_dim]; block_table
    [num_rows, max_blocks] int32; query_start_loc [num_rows + 1] and seq_lens [num_rows] int32. Row r's queries are
    q[query_start_loc[r] : query_start_loc[r + 1]].
    key_scale, value_scale: for a cache of 8 bits [num_blocks, block_size, num_kv_heads] float32, factors of the stored
    keys and values. For a cache of 4 bits, uint8 with head_dim / 2 bytes a head, [num_blocks, block_size, num_kv_heads,
    2] float16: factor and lowest number, see `to_four_bits`.
    ancestors [num_tokens] int64: in a row that is a tree, of at most 64 tokens, bit i is set if the query sees the i-th
    of its row's own tokens, itself included. Its position is that of the context's last token plus the number of bits
    set, and a window goes by positions. In other rows, which are causal, it is 0.
    skip_threshold: what the kernel may leave out; nothing is left out here.
    A row with seq_len 0 only pads the batch: its queries give zeros. NaN or infinity in a key or value has no effect on
    a query that does not see it. (In the kernel it may have, where their tile has it.)
    """
    out = torch.empty_like(q)
    for row, seq_len in enumerate(seq_lens.tolist()):
        first, end = query_start_loc[row : row + 2].tolist()
        if seq_len == 0:
            out[first:end] = 0
            continue
        # What left the window is not read: its blocks may be another request's, or hold NaN.
        unseen = 0 if window is None else max(0, seq_len - (end - first) - window + 1)
        slots = context_slots(block_table[row], seq_len, keys.shape[1])[unseen:]
        k, v = (
            stored(cache, slots, scales, q.new_empty(len(slots), cache.shape[2], q.shape[2]))
            for cache, scales in ((keys, key_scale), (values, value_scale))
        )
        if ancestors is None or not ancestors[first]:
            out[first:end] = attention_one_row(q[first:end], k, v, scale, window, softcap)
            mask = causal_mask(end - first, seq_len, q.device, window)[:, unseen:]
        else:
            mask = tree_mask(ancestors[first:end], seq_len, window)[:, unseen:]
            query, key, value = (t.transpose(0, 1)[None] for t in (q[first:end], k, v))
            out[first:end] = masked_attention(query, key, value, mask, scale, softcap)[0].transpose(0, 1)
        if not out[first:end].isfinite().all():
            # 0 x NaN is NaN, so what a query does not see is left out, instead of having a weight of 0.
            for at, sees in enumerate(mask):
                out[first + at] = attention_one_row(q[first + at][None], k[sees], v[sees], scale, None, softcap)[0]
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
    """Attention of one query per row, q [num_rows, num_heads, head_dim]; the rest as in `flash_attention`.

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
    """The mask [len(ancestors), seq_len], bool, true where a token of a tree may look: the context, and those of its
    row's own tokens whose bit is set in its mask. At position p it sees p - window + 1 ... p."""
    num_own = len(ancestors)
    order = torch.arange(num_own, device=ancestors.device)
    sees = ((ancestors[:, None] >> order) & 1).bool()  # [own tokens, own tokens]
    depths = sees.sum(1)
    context = torch.arange(num_own - seq_len + 1, 1, device=ancestors.device)  # the last one is at 0
    key = torch.cat((context, depths))
    mask = torch.cat((sees.new_ones(num_own, len(context)), sees), 1)
    return mask if window is None else mask & (key > depths[:, None] - window)


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
    if cache.dtype is torch.uint8:
        return out.copy_(from_four_bits(codes, scale[slots // size, slots % size], out.dtype))
    return out.copy_(codes).mul_(scale[slots // size, slots % size][..., None])
