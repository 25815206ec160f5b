# fault: who holds most goes first.
# fails: check_victims, check_preemption, check_engine

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """Who gives blocks back so that request_id gets `needed`. running: [(id, num_held)] -> ids, last come first."""
    victims = []
    for victim, num_held in sorted(running, key=lambda row: -row[1]):
        if free_blocks >= needed:
            break
        victims.append(victim)
        free_blocks += num_held
        if victim == request_id:
            break
    return victims
