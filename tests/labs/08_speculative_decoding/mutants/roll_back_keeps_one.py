# fault: the first block is kept always.
# fails: check_roll_back

# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    """(the blocks that the request keeps, the blocks that are free now)."""
    num_blocks = max(1, -(-num_tokens // block_size))
    return table[:num_blocks], [block for block in table[num_blocks:] if holders[block] == 1]
