# fault: the last draft is given out as the token.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    """(guesses on the path that the target says, in order; its token after them)."""
    at, path = -1, []
    for i, parent in enumerate(parents):
        if parent == at and tokens[i] == says[1 + at]:
            at = i
            path.append(i)
    return path[:-1], tokens[path[-1]] if path else says[0]
