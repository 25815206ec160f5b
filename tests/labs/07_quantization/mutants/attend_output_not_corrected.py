# fault: blocks of 32: where the largest score rises, the sum is corrected and the output is not.
# fails: check_attend

# %% nbgrader={"grade_id": "attend_kv"}
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    group, out = q.shape[0] // k_codes.shape[1], torch.zeros(q.shape)
    for h in range(q.shape[0]):
        g, top, total = h // group, -math.inf, 0.0
        for at in range(0, len(k_codes), 32):
            end = at + 32
            score = (k_codes[at:end, g].float() @ q[h].float()) * k_scales[at:end, g] / math.sqrt(q.shape[1])
            new = max(top, float(score.max()))
            p = (score - new).exp()
            total = total * math.exp(top - new) + float(p.sum())
            out[h] += (p * v_scales[at:end, g]) @ v_codes[at:end, g].float()
            top = new
        out[h] /= total
    return out
