# fault: rounding up adds 0.99, which is too little for large blocks.
# fails: check_roll_back

# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    num_blocks = int(num_tokens / block_size + 0.99)
    return table[:num_blocks], [block for block in table[num_blocks:] if holders[block] == 1]
