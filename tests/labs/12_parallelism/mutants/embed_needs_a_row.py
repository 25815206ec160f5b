# fault: an empty table is indexed.
# trap: nothing here
# fails: check_embed

# %% nbgrader={"grade_id": "embed"}
def embed(group, ids, table, start):
    """The rows of all ids, [n, hidden], from the tables of all ranks."""
    mine = (ids >= start) & (ids < start + len(table))
    found = table[torch.where(mine, ids - start, 0)].masked_fill(~mine[:, None], 0)
    return group.all_reduce(found)
