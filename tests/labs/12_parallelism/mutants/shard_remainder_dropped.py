# fault: the remainder is on no rank.
# fails: check_shard, check_heads

# %% nbgrader={"grade_id": "shard"}
def shard(n, size, rank):
    """(start, end) of this rank's part of n things."""
    each = n // size
    start = rank * each
    return start, start + each
