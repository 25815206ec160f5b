# fault: contiguous room is that of the longest request, which nobody knows in advance.
# fails: check_waste

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    """(contiguous, paged): slots taken by requests of these lengths that hold no token."""
    max_len = max(lengths)
    contiguous = sum(max_len - length for length in lengths)
    paged = sum(-(-length // block_size) * block_size - length for length in lengths)
    return contiguous, paged
