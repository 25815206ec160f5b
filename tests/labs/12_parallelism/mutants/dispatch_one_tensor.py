# fault: all that arrived is in one tensor, for rank 0.
# fails: check_dispatch

# %% nbgrader={"grade_id": "dispatch"}
def dispatch(group, x, ranks):
    """By rank: its tokens that chose an expert of this rank, in its order."""
    parts = [x[(ranks == rank).any(1)] for rank in range(group.size)]
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange({rank: parts[rank] for rank in others}, others)
    every = torch.cat([found.get(rank, parts[rank]) for rank in range(group.size)])
    return [every, *[every[:0]] * (group.size - 1)]
