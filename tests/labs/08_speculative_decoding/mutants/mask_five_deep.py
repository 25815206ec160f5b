# fault: a draft sees at most five that it continues.
# fails: check_mask

# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i in range(len(parents)):
        at, steps = i, 0
        while parents[at] >= 0 and steps < 5:
            at, steps = parents[at], steps + 1
            mask[i, at] = True
    return mask
