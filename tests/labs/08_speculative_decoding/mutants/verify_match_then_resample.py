# fault: a draft is kept if a sample of p equals it, and otherwise p is drawn from again.
# fails: check_kept, check_replaced, check_bonus, check_numbers, check_distribution, check_engine_copied,
#   check_engine_drafted

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    """(how many drafts are kept, the token after them). p [k + 1, vocab], q [k, vocab], drafts [k]."""
    for i, guess in enumerate(drafts):
        if draw(p[i], uniform()) != guess:
            return i, draw(p[i], uniform())
    return len(drafts), draw(p[len(drafts)], uniform())
