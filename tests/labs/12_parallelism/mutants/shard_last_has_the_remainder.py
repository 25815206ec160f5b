# fault: the last rank has the whole remainder.
# fails: check_shard, check_heads

# %% nbgrader={"grade_id": "shard"}
def shard(n, size, rank):
    """(start, end) of this rank's part of n things."""
    each, more = divmod(n, size)
    start = rank * each
    return start, start + each + more * (rank == size - 1)
