# fault: it takes the blocks out of the caller's table; what it answers is right.
# fails: check_roll_back

# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    """(the blocks that the request keeps, the blocks that are free now)."""
    num_blocks = -(-num_tokens // block_size)
    leaves = table[num_blocks:]
    del table[num_blocks:]
    return table, [block for block in leaves if holders[block] == 1]
