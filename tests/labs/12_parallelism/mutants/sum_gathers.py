# fault: every rank sends the whole tensor to all others.
# fails: check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(group, x):
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange(dict.fromkeys(others, x), others)
    total = torch.zeros_like(x)
    for rank in range(group.size):
        total = total + found.get(rank, x)
    return total
