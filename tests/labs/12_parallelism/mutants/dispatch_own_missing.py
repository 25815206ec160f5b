# fault: a rank's own tokens are left out.
# fails: check_dispatch

# %% nbgrader={"grade_id": "dispatch"}
def dispatch(group, x, ranks):
    """By rank: its tokens that chose an expert of this rank, in its order."""
    parts = [x[(ranks == rank).any(1)] for rank in range(group.size)]
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange({rank: parts[rank] for rank in others}, others)
    return [found.get(rank, parts[rank][:0]) for rank in range(group.size)]
