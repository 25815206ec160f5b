# fault: it takes the drafts out of the caller's list; what it answers is right.
# fails: check_kept, check_replaced, check_bonus, check_numbers, check_distribution, check_engine_copied,
#   check_engine_drafted

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    """(how many drafts are kept, the token after them). p [k + 1, vocab], q [k, vocab], drafts [k]."""
    k = len(drafts)
    while drafts:
        i, guess = k - len(drafts), drafts.pop(0)
        if uniform() * q[i, guess] >= p[i, guess]:
            return i, draw(residual(p[i], q[i]), uniform())
    return k, draw(p[k], uniform())
