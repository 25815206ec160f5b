# fault: all numbers are taken in advance.
# fails: check_numbers

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    """(how many drafts are kept, the token after them). p [k + 1, vocab], q [k, vocab], drafts [k]."""
    numbers = [uniform() for _ in range(len(drafts) + 1)]
    uniform = iter(numbers).__next__
    for i, guess in enumerate(drafts):
        if uniform() * q[i, guess] >= p[i, guess]:
            return i, draw(residual(p[i], q[i]), uniform())
    return len(drafts), draw(p[len(drafts)], uniform())
