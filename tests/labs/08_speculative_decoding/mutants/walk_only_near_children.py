# fault: after the first child, children are looked for only up to the first draft of another parent.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    at, path = -1, []
    while True:
        kid = None
        for i in range(at + 1, len(parents)):
            if parents[i] > at and kid is None and any(parents[j] == at for j in range(i)) and at > 0:
                break
            if parents[i] == at and tokens[i] == says[at + 1]:
                kid = i
                break
        if kid is None:
            return path, says[at + 1]
        path.append(kid)
        at = kid
