# fault: a parent and a token are made into one number, and two pairs give the same.
# fails: check_walk

# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    child = {parent * 100 + token: i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    at, path = -1, []
    while (key := at * 100 + says[1 + at]) in child:
        at = child[key]
        path.append(at)
        if len(path) > len(parents):
            break
    return path, says[1 + at]
