# fault: cuts what is not shared off the caller's table.
# fails: check_fork

# %% nbgrader={"grade_id": "fork"}
def fork(pool, block_table, num_tokens, block_size):
    """A block table that shares the blocks of the first num_tokens tokens, with a reference to each."""
    shared = block_table[: -(-num_tokens // block_size)]
    pool.incref(shared)
    del block_table[len(shared) :]
    return list(shared)
