# fault: asks for a place for the token that this step samples.
# fails: check_blocks, check_admit_whole, check_memory, check_turn, check_preemption, check_return, check_abort,
#   check_engine

# %% nbgrader={"grade_id": "more_blocks"}
def more_blocks(num_tokens, num_held, block_size):
    """How many blocks a request that holds num_held lacks for num_tokens tokens in all."""
    return max(0, -(-(num_tokens + 1) // block_size) - num_held)
