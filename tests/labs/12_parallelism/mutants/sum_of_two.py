# fault: it adds the neighbour's alone, which is right for two ranks.
# fails: check_sum, check_bits, check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(group, x):
    if group.size == 1:
        return x.clone()
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return x + group.exchange({after: x}, [before])[before]
