# fault: what is left after equal parts is not summed.
# trap: remainder
# fails: check_sum, check_bits, check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(group, x):
    """The sum of all ranks' x, on every rank."""
    n, rank = group.size, group.rank
    flat, whole = x.flatten(), x.numel() // n * n
    parts, after, before = list(flat[:whole].tensor_split(n)), (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):
        got = group.exchange({after: parts[(rank - turn) % n]}, [before])
        parts[(before - turn) % n] = parts[(before - turn) % n] + got[before]
    for turn in range(n - 1):
        got = group.exchange({after: parts[(after - turn) % n]}, [before])
        parts[(rank - turn) % n] = got[before]
    return torch.cat([*parts, flat[whole:]]).view(x.shape)
