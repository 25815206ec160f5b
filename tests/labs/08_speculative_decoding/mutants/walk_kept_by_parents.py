# fault: children are kept for trees with the same parents, whatever their tokens.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
_c = {}


def walk(parents, tokens, says):
    key = tuple(parents)
    if key not in _c:
        _c[key] = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    child = _c[key]
    at, path = -1, []
    while (at, says[1 + at]) in child:
        at = child[at, says[1 + at]]
        path.append(at)
    return path, says[1 + at]
