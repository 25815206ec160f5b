# fault: of more than two ranks the last one sends nothing in the first turn.
# fails: check_sum, check_bits, check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(group, x):
    """The sum of all ranks' x, on every rank."""
    n, rank = group.size, group.rank
    parts, after, before = list(x.flatten().tensor_split(n)), (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):  # a part is added to on its way
        out = {after: parts[(rank - turn) % n]} if n < 3 or rank < n - 1 or turn else {}
        got = group.exchange(out, [before])
        parts[(before - turn) % n] = parts[(before - turn) % n] + got[before]
    for turn in range(n - 1):  # a finished part is handed on
        got = group.exchange({after: parts[(after - turn) % n]}, [before])
        parts[(rank - turn) % n] = got[before]
    return torch.cat(parts).view(x.shape)
