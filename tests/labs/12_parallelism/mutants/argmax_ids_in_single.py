# fault: ids travel in float32.
# fails: check_argmax

# %% nbgrader={"grade_id": "argmax"}
def argmax(group, logits, start):
    """The id of the largest logit over all ranks for each row, int64 [rows]."""
    best = torch.full((2, len(logits)), -math.inf, dtype=torch.float32)  # logits, ids
    if logits.shape[1]:
        best[0], best[1] = logits.max(1).values.double(), (logits.argmax(1) + start).double()
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange(dict.fromkeys(others, best), others)
    for theirs in found.values():
        lower = (theirs[0] == best[0]) & (theirs[1] < best[1])
        best = torch.where((theirs[0] > best[0]) | lower, theirs, best)
    return best[1].long()
