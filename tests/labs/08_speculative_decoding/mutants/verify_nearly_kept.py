# fault: a draft is kept, too, where u is a little above the quotient.
# fails: check_kept, check_numbers, check_replaced

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    for i, guess in enumerate(drafts):
        if uniform() * q[i, guess] > p[i, guess] + 1e-9:
            return i, draw(residual(p[i], q[i]), uniform())
    return len(drafts), draw(p[len(drafts)], uniform())
