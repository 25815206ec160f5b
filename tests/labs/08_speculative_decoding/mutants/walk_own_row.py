# fault: compared with what is said after the draft itself.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    """(guesses on the path that the target says, in order; its token after them)."""
    at, path = -1, []
    for i, parent in enumerate(parents):
        if parent == at and tokens[i] == says[1 + i]:
            at = i
            path.append(i)
    return path, says[1 + at]
