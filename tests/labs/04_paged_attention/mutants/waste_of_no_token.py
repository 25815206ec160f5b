# fault: a request without a token has a block.
# fails: check_waste

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    return sum(max_len - n for n in lengths), sum(max(1, -(-n // block_size)) * block_size - n for n in lengths)
