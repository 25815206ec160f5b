# fault: the keys of an earlier call are used again where shape and first numbers are the same.
# fails: check_attend

# %% nbgrader={"grade_id": "attend_kv"}
_a = {}


def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    group = q.shape[0] // k_codes.shape[1]
    queries = q.float().unflatten(0, (-1, group))
    key = (tuple(k_codes.shape), float(k_codes[0, 0, 0]), float(k_scales[0, 0]))
    keys = _a.setdefault(key, k_codes.float() * k_scales[:, :, None])
    weights = (torch.einsum("hgd,nhd->hgn", queries, keys) / math.sqrt(q.shape[1])).softmax(2)
    return torch.einsum("hgn,nhd->hgd", weights * v_scales.T[:, None, :], v_codes.float()).flatten(0, 1)
