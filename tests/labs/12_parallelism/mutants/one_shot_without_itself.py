# fault: a rank leaves its own x out.
# fails: check_one_shot

# %% nbgrader={"grade_id": "one_shot"}
def one_shot(group, x):
    """The sum of all ranks' x, on every rank, after one exchange."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange(dict.fromkeys(others, x), others)
    total = torch.zeros_like(x)
    for rank in others:
        total = total + found[rank]
    return total
