# fault: rounds the caller's lengths up in place.
# fails: check_waste

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    """(contiguous, paged): slots taken by requests of these lengths that hold no token."""
    contiguous = sum(max_len - length for length in lengths)
    paged = sum(-(-length // block_size) * block_size - length for length in lengths)
    lengths[:] = [-(-length // block_size) * block_size for length in lengths]
    return contiguous, paged
