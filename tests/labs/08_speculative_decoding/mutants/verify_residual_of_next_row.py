# fault: the residual is of the row after the draft.
# fails: check_replaced, check_distribution, check_engine_copied, check_engine_drafted

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    """(how many drafts are kept, the token after them). p [k + 1, vocab], q [k, vocab], drafts [k]."""
    for i, guess in enumerate(drafts):
        if uniform() * q[i, guess] >= p[i, guess]:
            return i, draw(residual(p[i + 1], q[i]), uniform())
    return len(drafts), draw(p[len(drafts)], uniform())
