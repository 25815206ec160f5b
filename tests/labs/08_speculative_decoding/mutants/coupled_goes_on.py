# fault: wrong drafts are passed over.
# fails: check_coupled, check_engine_copied, check_engine_drafted

# %% nbgrader={"grade_id": "verify_coupled"}
def verify_coupled(p, drafts, noise, choose):
    """(how many drafts are kept, the token after them): those of plain decoding with the same noise."""
    for i, guess in enumerate(drafts):
        token = choose(p[i], noise[i])
        if token != guess:
            continue
    return len(drafts), choose(p[len(drafts)], noise[len(drafts)])
