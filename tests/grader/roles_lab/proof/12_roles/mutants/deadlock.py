# fault: every rank waits before it sends.
# fails: check_sum, check_uneven, check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(comm, x):
    got = comm.recv((comm.rank - 1) % comm.world_size)
    comm.send((comm.rank + 1) % comm.world_size, x + got)
    return x
