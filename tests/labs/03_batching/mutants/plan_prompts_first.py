# fault: prompts come before decodes.
# fails: check_decodes_first, check_decodes, check_memory, check_engine

# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Shares out `budget` new tokens. running: [(id, missing)] in order -> {id: n}, every n at least 1."""
    plan = {}
    decodes = [row for row in running if row[1] == 1]
    prompts = [row for row in running if row[1] > 1]
    for request_id, missing in prompts + decodes:
        num_tokens = min(missing, budget)
        if num_tokens > 0:
            plan[request_id] = num_tokens
            budget -= num_tokens
    return plan
