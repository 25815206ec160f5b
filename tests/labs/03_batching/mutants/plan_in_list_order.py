# fault: goes through the list as it is; a long prompt takes the decodes' share.
# fails: check_decodes_first, check_decodes

# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Shares out `budget` new tokens. running: [(id, missing)] in order -> {id: n}, every n at least 1."""
    plan = {}
    for request_id, missing in running:
        num_tokens = min(missing, budget)
        if num_tokens > 0:
            plan[request_id] = num_tokens
            budget -= num_tokens
    return plan
