# fault: a row is an int of 63 bits.
# fails: check_mask

# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    rows = []
    for i, parent in enumerate(parents):
        rows.append(((rows[parent] if parent >= 0 else 0) | (1 << i)) & ((1 << 63) - 1))
    return [[bool(row >> j & 1) for j in range(len(parents))] for row in rows]
