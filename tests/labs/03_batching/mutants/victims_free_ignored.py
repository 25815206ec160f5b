# fault: does not count the blocks that are free already.
# fails: check_victims, check_limits, check_missing, check_decodes, check_memory, check_turn, check_preemption,
#   check_return, check_abort, check_starvation, check_engine

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """Who gives blocks back so that request_id gets `needed`. running: [(id, num_held)] -> ids, last come first."""
    victims, free_blocks = [], 0
    for victim, num_held in reversed(running):
        if free_blocks >= needed:
            break
        victims.append(victim)
        free_blocks += num_held
        if victim == request_id:
            break
    return victims
