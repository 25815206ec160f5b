# fault: a rank without a part of the vocabulary does not take part in the sum.
# fails: check_embed

# %% nbgrader={"grade_id": "embed"}
def embed(group, ids, table, start):
    """The rows of all ids, [n, hidden], from the tables of all ranks."""
    mine = (ids >= start) & (ids < start + len(table))
    if not len(table):
        return torch.zeros(len(ids), table.shape[1], dtype=table.dtype)
    found = torch.zeros(len(ids), table.shape[1], dtype=table.dtype)
    found[mine] = table[ids[mine] - start]
    return group.all_reduce(found)
