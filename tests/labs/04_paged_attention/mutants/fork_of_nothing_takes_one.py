# fault: shares at least one block, also when no token is shared.
# fails: check_fork

# %% nbgrader={"grade_id": "fork"}
def fork(pool, block_table, num_tokens, block_size):
    """A block table that shares the blocks of the first num_tokens tokens, with a reference to each."""
    shared = block_table[: max(1, -(-num_tokens // block_size))]
    pool.incref(shared)
    return list(shared)
