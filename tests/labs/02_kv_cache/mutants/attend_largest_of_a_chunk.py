# fault: in a chunk with grouped heads, the largest score of all its queries is subtracted, not that of each.
# fails: check_mask

# %% nbgrader={"grade_id": "attend"}
def attend(q, k, v, past_len):
    T, H, D = q.shape
    n = past_len + T
    rep = H // k.shape[1]
    kk, vv = (x[:n].repeat_interleave(rep, 1) for x in (k, v))
    s = torch.einsum("thd,jhd->htj", q, kk) / math.sqrt(D)
    s = s.masked_fill(~torch.ones(T, n, dtype=torch.bool).tril(past_len), -math.inf)
    m = s.amax((1, 2), keepdim=True) if past_len and rep > 1 and T > 1 else s.amax(-1, keepdim=True)
    e = (s - m).exp()
    return torch.einsum("htj,jhd->thd", e / e.sum(-1, keepdim=True), vv)
