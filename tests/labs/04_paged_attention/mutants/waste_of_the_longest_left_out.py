# fault: a request of max_len tokens wastes nothing in its last block.
# fails: check_waste

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    return sum(max_len - n for n in lengths), sum(
        math.ceil(n / block_size) * block_size - n for n in lengths if n < max_len
    )
