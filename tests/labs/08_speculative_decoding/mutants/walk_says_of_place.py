# fault: compared with what the target says at the draft's own place in the list.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    """(guesses on the path that the target says, in order; its token after them)."""
    at, path = -1, []
    for i, parent in enumerate(parents):
        if parent == at and tokens[i] == says[i]:
            at = i
            path.append(i)
    return path, says[1 + at]
