# fault: never chooses the request that needs blocks.
# fails: check_victims, check_memory, check_engine

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """Who gives blocks back so that request_id gets `needed`. running: [(id, num_held)] -> ids, last come first."""
    victims = []
    for victim, num_held in reversed(running):
        if free_blocks >= needed:
            break
        if victim == request_id:
            break
        victims.append(victim)
        free_blocks += num_held
    return victims
