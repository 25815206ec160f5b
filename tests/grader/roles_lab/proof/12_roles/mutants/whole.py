# fault: every rank sends the whole tensor to every other.
# fails: check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(comm, x):
    others = [r for r in range(comm.world_size) if r != comm.rank]
    for r in others:
        comm.send(r, x)
    return x + sum(comm.recv(r) for r in others)
