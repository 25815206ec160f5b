# fault: the KV head of a rank is its number modulo the KV heads.
# trap: group
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
    place, kv = divmod(rank, num_kv_heads)
    start, end = shard(group, copies, place)
    return group * kv + start, group * kv + end, kv, kv + 1
