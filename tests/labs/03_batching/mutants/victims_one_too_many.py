# fault: goes on when exactly enough is free.
# trap: thrash
# fails: check_victims, check_memory, check_turn, check_preemption, check_return, check_abort, check_engine

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """Who gives blocks back so that request_id gets `needed`. running: [(id, num_held)] -> ids, last come first."""
    victims = []
    for victim, num_held in reversed(running):
        if free_blocks > needed:
            break
        victims.append(victim)
        free_blocks += num_held
        if victim == request_id:
            break
    return victims
