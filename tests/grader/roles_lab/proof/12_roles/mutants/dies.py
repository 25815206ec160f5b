# fault: one rank ends its process while the others wait for it.
# fails: check_sum, check_uneven, check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(comm, x):
    if comm.rank == 2:
        import os

        os._exit(0)
    return x + comm.recv(2)
