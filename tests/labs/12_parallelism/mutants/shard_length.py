# fault: a length in place of an end.
# fails: check_shard, check_heads, check_engine

# %% nbgrader={"grade_id": "shard"}
def shard(n, size, rank):
    """(start, end) of this rank's part of n things."""
    each, more = divmod(n, size)
    start = rank * each + min(rank, more)
    return start, each + (rank < more)
