# fault: who gets nothing is in the plan with 0 tokens.
# trap: zero tokens
# fails: check_chunks

# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Shares out `budget` new tokens. running: [(id, missing)] in order -> {id: n}, every n at least 1."""
    plan = {}
    decodes = [row for row in running if row[1] == 1]
    prompts = [row for row in running if row[1] > 1]
    for request_id, missing in decodes + prompts:
        num_tokens = min(missing, budget)
        plan[request_id] = num_tokens
        budget -= num_tokens
    return plan
