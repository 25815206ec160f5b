# fault: no bonus token: the last draft is the token.
# fails: check_kept, check_bonus, check_numbers, check_distribution, check_engine_copied, check_engine_drafted

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    """(how many drafts are kept, the token after them). p [k + 1, vocab], q [k, vocab], drafts [k]."""
    for i, guess in enumerate(drafts):
        if uniform() * q[i, guess] >= p[i, guess]:
            return i, draw(residual(p[i], q[i]), uniform())
    if not drafts:
        return 0, draw(p[0], uniform())
    return len(drafts) - 1, drafts[-1]
