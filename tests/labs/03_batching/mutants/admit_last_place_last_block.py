# fault: the last free block is never used by more than one request.
# fails: check_admit_whole, check_turn, check_abort

# %% nbgrader={"grade_id": "admit"}
def admit(waiting, budget, num_places, free_blocks, block_size):
    """Admits from the head of the line as long as all of a request fits. waiting: [(id, missing)] -> plan."""
    admitted = {}
    for request_id, missing in waiting:
        needed = more_blocks(missing, 0, block_size)
        if budget < 1 or len(admitted) == num_places or needed > free_blocks:
            break
        admitted[request_id] = min(missing, budget)
        budget -= admitted[request_id]
        free_blocks -= needed
        if free_blocks == 1:
            break
    return admitted
