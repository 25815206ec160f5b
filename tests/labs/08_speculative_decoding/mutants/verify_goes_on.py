# fault: drafts after a rejected one are judged as well, and all count.
# fails: check_kept, check_replaced, check_numbers, check_distribution, check_engine_copied, check_engine_drafted

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    """(how many drafts are kept, the token after them). p [k + 1, vocab], q [k, vocab], drafts [k]."""
    for i, guess in enumerate(drafts):
        if uniform() * q[i, guess] >= p[i, guess]:
            continue
    return len(drafts), draw(p[len(drafts)], uniform())
