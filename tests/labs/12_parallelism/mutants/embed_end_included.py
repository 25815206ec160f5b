# fault: the first token of the next rank is taken for one's own.
# fails: check_embed

# %% nbgrader={"grade_id": "embed"}
def embed(group, ids, table, start):
    """The rows of all ids, [n, hidden], from the tables of all ranks."""
    mine = (ids >= start) & (ids <= start + len(table))
    found = torch.zeros(len(ids), table.shape[1], dtype=table.dtype)
    found[mine] = table[(ids[mine] - start).clamp(max=max(0, len(table) - 1))] if len(table) else 0
    return group.all_reduce(found)
