# fault: shares the blocks and counts no reference: the first to end frees them for all.
# fails: check_fork, check_engine

# %% nbgrader={"grade_id": "fork"}
def fork(pool, block_table, num_tokens, block_size):
    """A block table that shares the blocks of the first num_tokens tokens, with a reference to each."""
    shared = block_table[: -(-num_tokens // block_size)]
    return list(shared)
