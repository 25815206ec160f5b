# fault: rows of the same length get the keys and values of the first of them.
# fails: check_batch_rows

# %% nbgrader={"grade_id": "attend_batch"}
def attend_batch(q, k, v, k_cache, v_cache, lengths):
    T = q.shape[1]
    outs = []
    for r, n in enumerate(lengths):
        k_cache[r, n : n + T] = k[r]
        v_cache[r, n : n + T] = v[r]
        src = list(lengths).index(n)
        outs.append(attend(q[r], k_cache[src], v_cache[src if n else r], n))
    return torch.stack(outs)
