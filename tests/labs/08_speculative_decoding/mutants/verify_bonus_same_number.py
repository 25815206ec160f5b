# fault: the last draft's number also draws the bonus.
# fails: check_bonus, check_numbers, check_distribution, check_engine_copied, check_engine_drafted

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    """(how many drafts are kept, the token after them). p [k + 1, vocab], q [k, vocab], drafts [k]."""
    u = 0.5
    for i, guess in enumerate(drafts):
        u = uniform()
        if u * q[i, guess] >= p[i, guess]:
            return i, draw(residual(p[i], q[i]), uniform())
    return len(drafts), draw(p[len(drafts)], u if drafts else uniform())
