# fault: asks for the blocks of the first chunk only.
# trap: half a prompt
# fails: check_admit_order, check_admit_whole, check_memory, check_engine

# %% nbgrader={"grade_id": "admit"}
def admit(waiting, budget, num_places, free_blocks, block_size):
    """Lets in from the head of the line while all of a request fits. waiting: [(id, missing)] -> {id: n}."""
    admitted = {}
    for request_id, missing in waiting:
        first_chunk = more_blocks(min(missing, budget), 0, block_size)
        if budget < 1 or len(admitted) == num_places or first_chunk > free_blocks:
            break
        admitted[request_id] = min(missing, budget)
        budget -= admitted[request_id]
        free_blocks -= first_chunk
    return admitted
