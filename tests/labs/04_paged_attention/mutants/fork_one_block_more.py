# fault: takes one block too many when the last one is exactly full.
# fails: check_fork, check_engine

# %% nbgrader={"grade_id": "fork"}
def fork(pool, block_table, num_tokens, block_size):
    """A block table that shares the blocks of the first num_tokens tokens, with a reference to each."""
    shared = block_table[: num_tokens // block_size + 1]
    pool.incref(shared)
    return list(shared)
