# fault: looks for the longest request, also where there is none.
# fails: check_waste

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    """(contiguous, paged): slots taken by requests of these lengths that hold no token."""
    assert max(lengths) <= max_len
    contiguous = sum(max_len - length for length in lengths)
    paged = sum(-(-length // block_size) * block_size - length for length in lengths)
    return contiguous, paged
