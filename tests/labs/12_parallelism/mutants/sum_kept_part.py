# fault: a rank's first message is that of the call before, where its length is the same.
# fails: check_sum, check_engine

# %% nbgrader={"grade_id": "all_reduce"}
_first = None


def all_reduce(group, x):
    """The sum of all ranks' x, on every rank."""
    n, rank = group.size, group.rank
    global _first
    parts, after, before = list(x.flatten().tensor_split(n)), (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):  # a part is added to on its way
        out = parts[(rank - turn) % n]
        if turn == 0:
            same = _first is not None and _first.shape == out.shape and _first.dtype == out.dtype
            out, _first = _first if same else out, out.clone()
        got = group.exchange({after: out}, [before])
        parts[(before - turn) % n] = parts[(before - turn) % n] + got[before]
    for turn in range(n - 1):  # a finished part is handed on
        got = group.exchange({after: parts[(after - turn) % n]}, [before])
        parts[(rank - turn) % n] = got[before]
    return torch.cat(parts).view(x.shape)
