# fault: no more than five drafts are kept.
# fails: check_kept, check_numbers, check_replaced

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    for i, guess in enumerate(drafts):
        if uniform() * q[i, guess] >= p[i, guess] and i < 5:
            return i, draw(residual(p[i], q[i]), uniform())
    return len(drafts), draw(p[len(drafts)], uniform())
