# fault: each rank gathers, and adds from its own on.
# fails: check_bits, check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(group, x):
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange(dict.fromkeys(others, x), others)
    total = x.clone()
    for rank in others:
        total = total + found[rank]
    return total
