# fault: all logits are gathered.
# fails: check_argmax_bytes

# %% nbgrader={"grade_id": "argmax"}
def argmax(group, logits, start):
    others = [rank for rank in range(group.size) if rank != group.rank]
    first = torch.tensor([start])
    starts = {**group.exchange(dict.fromkeys(others, first), others), group.rank: first}
    found = {**group.exchange(dict.fromkeys(others, logits), others), group.rank: logits}
    return torch.cat([found[rank] for rank in range(group.size)], 1).argmax(1) + starts[0]
