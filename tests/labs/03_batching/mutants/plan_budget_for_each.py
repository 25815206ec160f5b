# fault: every request gets up to the whole budget.
# fails: check_chunks, check_limits, check_engine

# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Shares out `budget` new tokens. running: [(id, missing)] in order -> {id: n}, every n at least 1."""
    plan = {}
    decodes = [row for row in running if row[1] == 1]
    prompts = [row for row in running if row[1] > 1]
    for request_id, missing in decodes + prompts:
        num_tokens = min(missing, budget)
        if num_tokens > 0:
            plan[request_id] = num_tokens
    return plan
