# fault: the largest score that is subtracted is that of all queries of a head.
# fails: check_weights, check_mask

# %% nbgrader={"grade_id": "attend"}
def attend(q, k, v, past_len):
    n = len(q)
    total = past_len + n
    g = q.shape[1] // k.shape[1]
    k, v = k[:total].repeat_interleave(g, 1), v[:total].repeat_interleave(g, 1)
    s = torch.einsum("nhd,thd->hnt", q, k) / math.sqrt(q.shape[-1])
    s = s.masked_fill(~torch.ones(n, total, dtype=torch.bool).tril(past_len), -math.inf)
    e = torch.exp(s - s.amax((1, 2), keepdim=True))
    return torch.einsum("hnt,thd->nhd", e / e.sum(-1, keepdim=True), v)
