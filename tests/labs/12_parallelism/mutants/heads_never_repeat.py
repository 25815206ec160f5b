# fault: more ranks than KV heads are refused.
# fails: check_heads, check_engine

# %% nbgrader={"grade_id": "heads"}
def heads(num_heads, num_kv_heads, size, rank):
    """(first query head, end, first KV head, end) of this rank, or None where the heads cannot be divided."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        start, end = shard(num_kv_heads, size, rank)
        return group * start, group * end, start, end
    copies, rest = divmod(size, num_kv_heads)
    if copies > 1 or rest:
        return None
    kv, place = divmod(rank, copies)
    start, end = shard(group, copies, place)
    return group * kv + start, group * kv + end, kv, kv + 1
