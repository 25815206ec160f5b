# fault: the last ranks have one more.
# fails: check_shard, check_heads

# %% nbgrader={"grade_id": "shard"}
def shard(n, size, rank):
    """(start, end) of this rank's part of n things."""
    each, more = divmod(n, size)
    start = rank * each + max(0, rank - (size - more))
    return start, start + each + (rank >= size - more)
