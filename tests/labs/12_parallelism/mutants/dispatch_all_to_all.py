# fault: every token goes to every rank, which picks.
# fails: check_dispatch

# %% nbgrader={"grade_id": "dispatch"}
def dispatch(group, x, ranks):
    others = [rank for rank in range(group.size) if rank != group.rank]
    rows = group.exchange(dict.fromkeys(others, x), others) | {group.rank: x}
    to = group.exchange(dict.fromkeys(others, ranks), others) | {group.rank: ranks}
    return [rows[rank][(to[rank] == group.rank).any(1)] for rank in range(group.size)]
