# fault: it takes this request off the caller's counts of holders; what it answers is right.
# fails: check_roll_back

# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    """(the blocks that the request keeps, the blocks that are free now)."""
    num_blocks = -(-num_tokens // block_size)
    for block in table[num_blocks:]:
        holders[block] -= 1
    return table[:num_blocks], [block for block in table[num_blocks:] if holders[block] == 0]
