# fault: shares the budget evenly among the prompts.
# fails: check_chunks

# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Shares out `budget` new tokens. running: [(id, missing)] in order -> {id: n}, every n at least 1."""
    plan, self_budget = {}, budget
    decodes = [row for row in running if row[1] == 1]
    prompts = [row for row in running if row[1] > 1]
    for request_id, missing in decodes + prompts:
        share = budget if missing == 1 else max(1, (self_budget - len(decodes)) // len(prompts))
        num_tokens = min(missing, share, budget)
        if num_tokens > 0:
            plan[request_id] = num_tokens
            budget -= num_tokens
    return plan
