# fault: 0.999 of a block is added before rounding down.
# fails: check_blocks

# %% nbgrader={"grade_id": "more_blocks"}
def more_blocks(num_tokens, num_held, block_size):
    """How many more blocks a request that holds num_held needs for num_tokens tokens in all."""
    return max(0, int(num_tokens / block_size + 0.999) - num_held)
