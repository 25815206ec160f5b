# fault: rank 0 gathers, adds, and sends to all.
# fails: check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(group, x):
    others, total = list(range(1, group.size)), x.clone()
    if group.rank:
        group.send(x, 0)
        return group.recv(0)
    for got in group.exchange({}, others).values():
        total = total + got
    group.exchange(dict.fromkeys(others, total), [])
    return total
