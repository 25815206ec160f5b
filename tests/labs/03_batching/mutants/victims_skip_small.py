# fault: a victim that gives back one block only is passed over if more are needed.
# fails: check_victims

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """The victims whose blocks request_id needs. running: [(id, num_held)] -> ids, last come first."""
    victims = []
    for victim, num_held in reversed(running):
        if free_blocks >= needed:
            break
        if num_held == 1 and needed - free_blocks > 1 and victim != request_id:
            continue
        victims.append(victim)
        free_blocks += num_held
        if victim == request_id:
            break
    return victims
