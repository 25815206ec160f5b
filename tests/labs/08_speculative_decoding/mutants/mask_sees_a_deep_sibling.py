# fault: a draft with three or more before it sees the sibling beside it.
# fails: check_mask

# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    m = torch.eye(len(parents), dtype=torch.bool)
    for i, p in enumerate(parents):
        if p >= 0:
            m[i] |= m[p]
        if p > 0 and parents[p] > 0 and parents[i - 1] == p:
            m[i, i - 1] = True
    return m
