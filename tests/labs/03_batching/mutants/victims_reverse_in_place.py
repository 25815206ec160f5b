# fault: reverses the caller's list.
# fails: check_victims

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """The victims whose blocks request_id needs. running: [(id, num_held)] -> ids, last come first."""
    given, running = running, list(running)
    given.reverse()
    victims = []
    for victim, num_held in reversed(running):
        if free_blocks >= needed:
            break
        victims.append(victim)
        free_blocks += num_held
        if victim == request_id:
            break
    return victims
