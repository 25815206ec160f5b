# fault: copies only where the block is partly full: a reserved block that is shared and empty is written in place.
# fails: check_append_refused, check_copy_on_write

# %% nbgrader={"grade_id": "append_slots"}
def append_slots(pool, block_table, num_tokens, num_new, block_size, copy):
    """(block_table, slots) for num_new more tokens of a request that has num_tokens.

    copy(src, dst): copies the contents of a block. RuntimeError, and nothing changed, if too few blocks are free.
    """
    table = list(block_table)
    first = num_tokens // block_size  # the table entry of the first new token
    missing = max(0, -(-(num_tokens + num_new) // block_size) - len(table))
    shared = num_tokens % block_size > 0 and first < len(table) and pool.ref_count(table[first]) > 1
    new = pool.allocate(missing + shared)
    if shared:
        source, table[first] = table[first], new.pop()
        copy(source, table[first])
        pool.decref([source])
    table += new
    slots = [table[p // block_size] * block_size + p % block_size for p in range(num_tokens, num_tokens + num_new)]
    return table, slots
