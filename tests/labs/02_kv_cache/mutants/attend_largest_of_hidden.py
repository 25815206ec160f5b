# fault: the largest score that is subtracted may be that of a hidden key.
# fails: check_mask

# %% nbgrader={"grade_id": "attend"}
def attend(q, k, v, past_len):
    n = len(q)
    total = past_len + n
    g = q.shape[1] // k.shape[1]
    k, v = k[:total].repeat_interleave(g, 1), v[:total].repeat_interleave(g, 1)
    s = torch.einsum("nhd,thd->hnt", q, k) / math.sqrt(q.shape[-1])
    e = torch.exp(s - s.max(-1, keepdim=True).values) * torch.ones(n, total).tril(past_len)
    return torch.einsum("hnt,thd->nhd", e / e.sum(-1, keepdim=True), v)
