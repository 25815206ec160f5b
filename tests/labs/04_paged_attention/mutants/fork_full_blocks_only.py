# fault: rounds down: the last tokens, in a block that is half full, are not shared.
# trap: part of a block
# fails: check_fork, check_engine

# %% nbgrader={"grade_id": "fork"}
def fork(pool, block_table, num_tokens, block_size):
    """A block table that shares the blocks of the first num_tokens tokens, with a reference to each."""
    shared = block_table[: num_tokens // block_size]
    pool.incref(shared)
    return list(shared)
