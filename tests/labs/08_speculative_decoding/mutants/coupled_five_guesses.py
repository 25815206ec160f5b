# fault: no more than five drafts are looked at.
# fails: check_coupled

# %% nbgrader={"grade_id": "verify_coupled"}
def verify_coupled(p, drafts, noise, choose):
    drafts = drafts[:5]
    for i, guess in enumerate(drafts):
        token = choose(p[i], noise[i])
        if token != guess:
            return i, token
    return len(drafts), choose(p[len(drafts)], noise[len(drafts)])
