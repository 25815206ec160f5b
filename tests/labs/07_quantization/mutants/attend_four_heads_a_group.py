# fault: a KV head is read by four query heads at most.
# fails: check_attend

# %% nbgrader={"grade_id": "attend_kv"}
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    """o [num_heads, head_dim] of q [num_heads, head_dim] over quantized keys and values."""
    group = min(4, q.shape[0] // k_codes.shape[1])
    queries = q.float().unflatten(0, (-1, group))  # [num_kv_heads, group, head_dim]
    scores = torch.einsum("hgd,nhd->hgn", queries, k_codes.float()) / math.sqrt(q.shape[1])
    weights = (scores * k_scales.T[:, None, :]).softmax(2)
    return torch.einsum("hgn,nhd->hgd", weights * v_scales.T[:, None, :], v_codes.float()).flatten(0, 1)
