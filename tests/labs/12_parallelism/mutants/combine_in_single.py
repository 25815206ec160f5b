# fault: the sum is always float32.
# fails: check_combine

# %% nbgrader={"grade_id": "combine"}
def combine(group, outputs, ranks):
    """For each of this rank's tokens the sum of what its experts' ranks made of it, [tokens, hidden]."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange({rank: outputs[rank] for rank in others}, others)
    total = torch.zeros(len(ranks), outputs[0].shape[1], dtype=torch.float32)
    for rank in range(group.size):
        total[(ranks == rank).any(1)] += found.get(rank, outputs[rank])
    return total
