# fault: what cannot be divided is divided somehow.
# fails: check_heads

# %% nbgrader={"grade_id": "heads"}
def heads(num_heads, num_kv_heads, size, rank):
    """(first query head, end, first KV head, end) of this rank, or None where the heads cannot be divided."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        start, end = shard(num_kv_heads, size, rank)
        return group * start, group * end, start, end
    copies = max(1, size // num_kv_heads)
    kv, place = min(rank // copies, num_kv_heads - 1), rank % copies
    start, end = shard(group, copies, place)
    return group * kv + start, group * kv + end, kv, kv + 1
