# fault: block 0 is taken for no block, and is written although it has another holder.
# fails: check_copy_on_write, check_engine

# %% nbgrader={"grade_id": "append_slots"}
def append_slots(pool, block_table, num_tokens, num_new, block_size, copy):
    """(block_table, slots) for num_new more tokens of a request that has num_tokens.

    copy(src, dst): copies the contents of a block. RuntimeError, and nothing changed, if too few blocks are free.
    """
    table = list(block_table)
    first = num_tokens // block_size  # the table entry of the first new token
    missing = max(0, -(-(num_tokens + num_new) // block_size) - len(table))
    shared = first < len(table) and table[first] != 0 and pool.ref_count(table[first]) > 1
    new = pool.allocate(missing + shared)
    if shared:
        source, table[first] = table[first], new.pop()
        copy(source, table[first])
        pool.decref([source])
    table += new
    slots = [table[p // block_size] * block_size + p % block_size for p in range(num_tokens, num_tokens + num_new)]
    return table, slots
