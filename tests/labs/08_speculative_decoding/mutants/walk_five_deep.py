# fault: the path has at most five drafts.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    at, path = -1, []
    for i, parent in enumerate(parents):
        if parent == at and tokens[i] == says[1 + at] and len(path) < 5:
            at = i
            path.append(i)
    return path, says[1 + at]
