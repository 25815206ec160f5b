# fault: NaN in the padding is replaced, an infinite number is not.
# fails: check_batch_rows

# %% nbgrader={"grade_id": "attend_batch"}
def attend_batch(q, k, v, k_cache, v_cache, lengths):
    rows, n = q.shape[:2]
    at = torch.tensor(lengths)[:, None] + torch.arange(n)
    where = (torch.arange(rows)[:, None], at)
    k_cache[where], v_cache[where] = k, v
    seen = torch.arange(k_cache.shape[1])[None, None] <= at[:, :, None]
    g = q.shape[2] // k.shape[2]
    keys, values = (torch.where(x.isnan(), 0.0, x).repeat_interleave(g, 2) for x in (k_cache, v_cache))
    s = torch.einsum("rnhd,rthd->rhnt", q, keys) * q.shape[-1] ** -0.5
    return torch.einsum("rhnt,rthd->rnhd", s.masked_fill(~seen[:, None], -math.inf).softmax(-1), values)
