# fault: of the requests with one missing token only half of the budget is used when there are prompts.
# fails: check_decodes_first

# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Distributes `budget` new tokens. running: [(id, missing)] in order -> plan, every n at least 1."""
    plan = {}
    decodes = [row for row in running if row[1] == 1]
    prompts = [row for row in running if row[1] > 1]
    if len(decodes) > 4 and prompts:
        decodes = decodes[: max(4, budget // 2)]
    for request_id, missing in decodes + prompts:
        num_tokens = min(missing, budget)
        if num_tokens > 0:
            plan[request_id] = num_tokens
            budget -= num_tokens
    return plan
