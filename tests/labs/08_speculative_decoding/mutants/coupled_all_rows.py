# fault: all rows are chosen from.
# fails: check_coupled

# %% nbgrader={"grade_id": "verify_coupled"}
def verify_coupled(p, drafts, noise, choose):
    """(how many drafts are kept, the token after them): those of plain decoding with the same noise."""
    chosen = [choose(row, number) for row, number in zip(p, noise, strict=True)]
    for i, guess in enumerate(drafts):
        token = chosen[i]
        if token != guess:
            return i, token
    return len(drafts), chosen[-1]
