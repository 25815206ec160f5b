# fault: drafts of other branches are taken.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    """(guesses on the path that the target says, in order; its token after them)."""
    at, path = -1, []
    for i in range(len(parents)):
        if tokens[i] == says[1 + at]:
            at = i
            path.append(i)
    return path, says[1 + at]
