# fault: takes a single row for a first token: it reads its newest token alone.
# fails: check_weights, check_heads, check_engine

# %% nbgrader={"grade_id": "paged_attention"}
def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    """One query per row over its own paged context.

    q [rows, num_heads, head_dim]; k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim];
    block_table int32 [rows, max_blocks]; seq_lens int32 [rows] -> like q.
    """
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    for row in range(len(q)):
        position = torch.arange(int(seq_lens[row]))
        if len(q) == 1:
            position = position[-1:]
        blocks, offsets = block_table[row].long()[position // block_size], position % block_size
        keys = k_cache[blocks, offsets].repeat_interleave(group, dim=1)  # [seq_len, num_heads, head_dim]
        values = v_cache[blocks, offsets].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q[row], keys) / math.sqrt(head_dim)
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
    return out
