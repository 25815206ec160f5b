# fault: gathers as many positions as the longest row has, and masks: a short row reads block 0.
# fails: check_unused, check_engine

# %% nbgrader={"grade_id": "paged_attention"}
import math

import torch


def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    """One query per row over its own paged context.

    q [rows, num_heads, head_dim]; k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim];
    block_table int32 [rows, max_blocks]; seq_lens int32 [rows] -> like q.
    """
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    for row in range(len(q)):
        length = int(seq_lens[row])
        position = torch.arange(int(seq_lens.max()))
        blocks, offsets = block_table[row].long()[position // block_size], position % block_size
        keys = k_cache[blocks, offsets].repeat_interleave(group, dim=1)  # [seq_len, num_heads, head_dim]
        values = v_cache[blocks, offsets].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q[row], keys) / math.sqrt(head_dim)
        scores[:, length:] = float("-inf")
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
    return out
