# fault: a prompt that does not fit as a whole is passed over if a later one fits.
# fails: check_chunks

# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Distributes `budget` new tokens. running: [(id, missing)] in order -> plan, every n at least 1."""
    plan = {}
    decodes = [row for row in running if row[1] == 1]
    prompts = [row for row in running if row[1] > 1]
    for request_id, missing in decodes + prompts:
        num_tokens = min(missing, budget)
        if num_tokens < missing and any(1 < m <= budget and r not in plan and r != request_id for r, m in prompts):
            continue
        if num_tokens > 0:
            plan[request_id] = num_tokens
            budget -= num_tokens
    return plan
