# fault: all parts are rounded up, and the last ones are short.
# fails: check_shard, check_heads

# %% nbgrader={"grade_id": "shard"}
def shard(n, size, rank):
    each = math.ceil(n / size)
    return min(n, rank * each), min(n, (rank + 1) * each)
