# fault: one exchange after another.
# fails: check_one_shot

# %% nbgrader={"grade_id": "one_shot"}
def one_shot(group, x):
    """The sum of all ranks' x, on every rank, after one exchange."""
    found, n = {}, group.size
    for hop in range(1, n):
        to, source = (group.rank + hop) % n, (group.rank - hop) % n
        found |= group.exchange({to: x}, [source])
    total = torch.zeros_like(x)
    for rank in range(group.size):
        total = total + found.get(rank, x)
    return total
