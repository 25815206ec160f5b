# fault: the first and the last rank have each other's part.
# fails: check_shard, check_heads, check_engine

# %% nbgrader={"grade_id": "shard"}
def shard(n, size, rank):
    """(start, end) of this rank's part of n things."""
    rank = size - 1 - rank
    each, more = divmod(n, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)
