# fault: parts are of equal size, and the rest is left out.
# fails: check_uneven

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(comm, x):
    size, rank = comm.world_size, comm.rank
    n = len(x) // size
    parts = [x[i * n : (i + 1) * n].clone() for i in range(size)]
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        comm.send(after, parts[(rank - step) % size])
        parts[(before - step) % size] += comm.recv(before)
    for step in range(size - 1):
        comm.send(after, parts[(rank + 1 - step) % size])
        parts[(rank - step) % size] = comm.recv(before)
    return torch.cat(parts)
