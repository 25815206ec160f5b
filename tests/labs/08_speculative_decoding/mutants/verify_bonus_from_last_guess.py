# fault: the bonus comes from the row of the last draft.
# fails: check_bonus, check_distribution, check_engine_copied, check_engine_drafted

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    """(how many drafts are kept, the token after them). p [k + 1, vocab], q [k, vocab], drafts [k]."""
    for i, guess in enumerate(drafts):
        if uniform() * q[i, guess] >= p[i, guess]:
            return i, draw(residual(p[i], q[i]), uniform())
    return len(drafts), draw(p[max(len(drafts) - 1, 0)], uniform())
