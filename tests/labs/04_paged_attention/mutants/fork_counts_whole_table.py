# fault: adds a reference to reserved blocks, too, which the fork does not hold.
# fails: check_fork, check_engine

# %% nbgrader={"grade_id": "fork"}
def fork(pool, block_table, num_tokens, block_size):
    """A block table that shares the blocks of the first num_tokens tokens, with a reference to each."""
    shared = block_table[: -(-num_tokens // block_size)]
    pool.incref(block_table)
    return list(shared)
