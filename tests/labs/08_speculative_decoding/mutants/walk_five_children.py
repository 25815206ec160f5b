# fault: only the first five children are looked at.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    at, path = -1, []
    while True:
        children = [i for i, parent in enumerate(parents) if parent == at][:5]
        child = next((i for i in children if tokens[i] == says[1 + at]), None)
        if child is None:
            return path, says[1 + at]
        at = child
        path.append(at)
