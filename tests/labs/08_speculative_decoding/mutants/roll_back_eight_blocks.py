# fault: at most eight blocks are freed.
# fails: check_roll_back

# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    num_blocks = -(-num_tokens // block_size)
    return table[:num_blocks], [block for block in table[num_blocks : num_blocks + 8] if holders[block] == 1]
