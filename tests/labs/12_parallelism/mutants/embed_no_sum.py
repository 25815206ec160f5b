# fault: a rank gives out its own rows only.
# fails: check_embed

# %% nbgrader={"grade_id": "embed"}
def embed(group, ids, table, start):
    """The rows of all ids, [n, hidden], from the tables of all ranks."""
    mine = (ids >= start) & (ids < start + len(table))
    found = torch.zeros(len(ids), table.shape[1], dtype=table.dtype)
    found[mine] = table[ids[mine] - start]
    return found
