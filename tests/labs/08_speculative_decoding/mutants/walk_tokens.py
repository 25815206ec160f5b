# fault: tokens in place of drafts.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    """(guesses on the path that the target says, in order; its token after them)."""
    at, path = -1, []
    for i, parent in enumerate(parents):
        if parent == at and tokens[i] == says[1 + at]:
            at = i
            path.append(tokens[i])
    return path, says[1 + at]
