# fault: no token after the last draft.
# fails: check_coupled, check_engine_copied, check_engine_drafted

# %% nbgrader={"grade_id": "verify_coupled"}
def verify_coupled(p, drafts, noise, choose):
    """(how many drafts are kept, the token after them): those of plain decoding with the same noise."""
    for i, guess in enumerate(drafts):
        token = choose(p[i], noise[i])
        if token != guess:
            return i, token
    return (len(drafts) - 1, drafts[-1]) if drafts else (0, choose(p[0], noise[0]))
