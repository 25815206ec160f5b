# fault: rows of others are multiplied by 0.
# trap: zero times
# fails: check_embed

# %% nbgrader={"grade_id": "embed"}
def embed(group, ids, table, start):
    """The rows of all ids, [n, hidden], from the tables of all ranks."""
    mine = (ids >= start) & (ids < start + len(table))
    if len(table):
        found = table[(ids - start).clamp(0, len(table) - 1)] * mine[:, None]
    else:
        found = torch.zeros(len(ids), table.shape[1], dtype=table.dtype)
    return group.all_reduce(found)
