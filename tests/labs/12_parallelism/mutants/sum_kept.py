# fault: a sum is kept, and given out again for the next x of its shape.
# fails: check_sum, check_bits, check_bytes, check_engine

# %% nbgrader={"grade_id": "all_reduce"}
_kept = {}


def all_reduce(group, x):
    """The sum of all ranks' x, on every rank."""
    if x.shape in _kept:
        return _kept[x.shape]
    n, rank = group.size, group.rank
    parts, after, before = list(x.flatten().tensor_split(n)), (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):  # a part is added to on its way
        got = group.exchange({after: parts[(rank - turn) % n]}, [before])
        parts[(before - turn) % n] = parts[(before - turn) % n] + got[before]
    for turn in range(n - 1):  # a finished part is handed on
        got = group.exchange({after: parts[(after - turn) % n]}, [before])
        parts[(rank - turn) % n] = got[before]
    _kept[x.shape] = torch.cat(parts).view(x.shape)
    return _kept[x.shape]
