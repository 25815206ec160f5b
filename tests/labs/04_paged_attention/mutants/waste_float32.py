# fault: adds up in float32, which has 24 bits for a whole number.
# fails: check_waste

# %% nbgrader={"grade_id": "wasted_slots"}
def wasted_slots(lengths, max_len, block_size):
    """(contiguous, paged): slots taken by requests of these lengths that hold no token."""
    lengths = torch.tensor(lengths)
    contiguous = float((max_len - lengths).float().sum())
    paged = int((-lengths % block_size).sum())
    return contiguous, paged
