# fault: lets in one request more than there are places.
# fails: check_admit_order, check_limits, check_turn, check_engine, check_abort, check_starvation

# %% nbgrader={"grade_id": "admit"}
def admit(waiting, budget, num_places, free_blocks, block_size):
    """Lets in from the head of the line while all of a request fits. waiting: [(id, missing)] -> {id: n}."""
    admitted = {}
    for request_id, missing in waiting:
        needed = more_blocks(missing, 0, block_size)
        if budget < 1 or len(admitted) > num_places or needed > free_blocks:
            break
        admitted[request_id] = min(missing, budget)
        budget -= admitted[request_id]
        free_blocks -= needed
    return admitted
