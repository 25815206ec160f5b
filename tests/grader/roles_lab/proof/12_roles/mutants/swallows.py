# fault: every rank waits before it sends, and does not believe that nothing comes.
# fails: check_sum, check_uneven, check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(comm, x):
    try:
        return x + comm.recv((comm.rank - 1) % comm.world_size)
    except RuntimeError:
        raise ValueError("gave up") from None
