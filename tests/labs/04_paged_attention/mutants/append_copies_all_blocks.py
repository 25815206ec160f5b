# fault: copies every block that is shared, not just the one it writes into.
# fails: check_append_refused, check_copy_on_write, check_engine

# %% nbgrader={"grade_id": "append_slots"}
def append_slots(pool, block_table, num_tokens, num_new, block_size, copy):
    """(block_table, slots) for num_new more tokens of a request that has num_tokens.

    copy(src, dst): copies the contents of a block. RuntimeError, and nothing changed, if too few blocks are free.
    """
    table = list(block_table)
    missing = max(0, -(-(num_tokens + num_new) // block_size) - len(table))
    shared = [i for i, block in enumerate(table) if pool.ref_count(block) > 1]
    new = pool.allocate(missing + len(shared))
    for i in shared:
        source, table[i] = table[i], new.pop()
        copy(source, table[i])
        pool.decref([source])
    table += new
    slots = [table[p // block_size] * block_size + p % block_size for p in range(num_tokens, num_tokens + num_new)]
    return table, slots
