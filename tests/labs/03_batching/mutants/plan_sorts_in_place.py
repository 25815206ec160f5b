# fault: sorts the requests in place.
# fails: check_chunks, check_decodes_first

# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Distributes `budget` new tokens. running: [(id, missing)] in order -> plan, every n at least 1."""
    given, running = running, list(running)
    given.sort(key=lambda row: row[1])
    plan = {}
    decodes = [row for row in running if row[1] == 1]
    prompts = [row for row in running if row[1] > 1]
    for request_id, missing in decodes + prompts:
        num_tokens = min(missing, budget)
        if num_tokens > 0:
            plan[request_id] = num_tokens
            budget -= num_tokens
    return plan
