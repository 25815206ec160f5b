# fault: chooses one victim and does not look whether that is enough.
# fails: check_victims

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """Who gives blocks back so that request_id gets `needed`. running: [(id, num_held)] -> ids, last come first."""
    victims = []
    for victim, _ in reversed(running):
        if free_blocks >= needed:
            break
        victims.append(victim)
        break
    return victims
