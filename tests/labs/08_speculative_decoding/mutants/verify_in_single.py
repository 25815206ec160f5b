# fault: p and q are rounded to float32.
# fails: check_kept, check_numbers, check_replaced, check_bonus

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    p, q = p.float(), q.float()
    for i, guess in enumerate(drafts):
        if uniform() * q[i, guess] >= p[i, guess]:
            return i, draw(residual(p[i], q[i]), uniform())
    return len(drafts), draw(p[len(drafts)], uniform())
