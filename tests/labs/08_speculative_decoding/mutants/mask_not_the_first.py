# fault: draft 0 is no parent.
# fails: check_mask

# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    """[n, n] bool: which guesses each guess sees: itself and those it continues."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent > 0:
            mask[i] |= mask[parent]
    return mask
