# fault: query heads are numbered within their group.
# fails: check_heads

# %% nbgrader={"grade_id": "heads"}
def heads(num_heads, num_kv_heads, size, rank):
    """(first query head, end, first KV head, end) of this rank, or None where the heads cannot be divided."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        start, end = shard(num_kv_heads, size, rank)
        return group * start, group * end, start, end
    copies, rest = divmod(size, num_kv_heads)
    if rest or copies > group:
        return None
    kv, place = divmod(rank, copies)
    start, end = shard(group, copies, place)
    return start, end, kv, kv + 1
