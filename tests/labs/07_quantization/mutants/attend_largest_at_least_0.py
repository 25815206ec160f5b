# fault: the largest score counts as 0 at least: scores far below 0 give 0 / 0.
# fails: check_attend

# %% nbgrader={"grade_id": "attend_kv"}
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    group = q.shape[0] // k_codes.shape[1]
    k, v = (
        (c.float() * s[:, :, None]).repeat_interleave(group, 1) for c, s in ((k_codes, k_scales), (v_codes, v_scales))
    )
    scores = torch.einsum("hd,nhd->hn", q.float(), k) / math.sqrt(q.shape[1])
    weights = (scores - scores.amax(1, keepdim=True).clamp(min=0)).exp()
    weights = weights / weights.sum(1, keepdim=True)
    return torch.einsum("hn,nhd->hd", weights, v)
