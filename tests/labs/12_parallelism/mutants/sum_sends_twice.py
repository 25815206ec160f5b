# fault: the first part is sent a second time at the end.
# fails: check_sum, check_bits, check_bytes, check_engine

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(group, x):
    """The sum of all ranks' x, on every rank."""
    n, rank = group.size, group.rank
    parts, after, before = list(x.flatten().tensor_split(n)), (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):  # a part is added to on its way
        got = group.exchange({after: parts[(rank - turn) % n]}, [before])
        parts[(before - turn) % n] = parts[(before - turn) % n] + got[before]
    for turn in range(n - 1):  # a finished part is handed on
        got = group.exchange({after: parts[(after - turn) % n]}, [before])
        parts[(rank - turn) % n] = got[before]
    if n > 1:
        group.exchange({after: parts[rank]}, [])
    return torch.cat(parts).view(x.shape)
