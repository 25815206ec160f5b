# fault: the largest score that is subtracted is that of all heads.
# fails: check_weights

# %% nbgrader={"grade_id": "paged_attention"}
def paged_attention(q, k_cache, v_cache, block_table, seq_lens):
    rows, heads, d = q.shape
    size, kv = k_cache.shape[1:3]
    out = torch.empty_like(q)
    for r in range(rows):
        n = int(seq_lens[r])
        at = torch.arange(n)
        blocks = block_table[r].long()[at // size]
        k, v = (c[blocks, at % size].repeat_interleave(heads // kv, 1) for c in (k_cache, v_cache))
        s = torch.einsum("hd,thd->ht", q[r], k) / math.sqrt(d)
        out[r] = torch.einsum("ht,thd->hd", (e := (s - s.max()).exp()).div(e.sum(-1, keepdim=True)), v)
    return out
