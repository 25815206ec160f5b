# fault: from the sixth draft on the residual is that of the row before.
# fails: check_replaced

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    for i, guess in enumerate(drafts):
        if uniform() * q[i, guess] >= p[i, guess]:
            return i, draw(residual(p[min(i, 5)], q[min(i, 5)]), uniform())
    return len(drafts), draw(p[len(drafts)], uniform())
