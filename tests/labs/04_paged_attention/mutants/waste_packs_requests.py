# fault: lets all requests share their last blocks: rounds the sum up, not each length.
# fails: check_waste

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    """(contiguous, paged): slots taken by requests of these lengths that hold no token."""
    contiguous = sum(max_len - length for length in lengths)
    paged = -(-sum(lengths) // block_size) * block_size - sum(lengths)
    return contiguous, paged
