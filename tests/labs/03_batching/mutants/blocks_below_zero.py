# fault: who holds more than it needs lacks a negative number.
# fails: check_blocks

# %% nbgrader={"grade_id": "more_blocks"}
def more_blocks(num_tokens, num_held, block_size):
    """How many blocks a request that holds num_held lacks for num_tokens tokens in all."""
    return -(-num_tokens // block_size) - num_held
