# fault: a request that finds no block preempts itself, although others came later.
# fails: check_victims, check_preemption, check_engine

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """Who gives blocks back so that request_id gets `needed`. running: [(id, num_held)] -> ids, last come first."""
    victims = []
    for victim, num_held in [row for row in running if row[0] == request_id]:
        if free_blocks >= needed:
            break
        victims.append(victim)
        free_blocks += num_held
        if victim == request_id:
            break
    return victims
