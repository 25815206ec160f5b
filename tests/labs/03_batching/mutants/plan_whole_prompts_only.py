# fault: a prompt that does not fit into the budget as a whole gets nothing.
# fails: check_chunks, check_limits, check_missing, check_decodes, check_memory, check_turn, check_preemption,
#   check_return, check_abort, check_starvation, check_engine

# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Shares out `budget` new tokens. running: [(id, missing)] in order -> {id: n}, every n at least 1."""
    plan = {}
    decodes = [row for row in running if row[1] == 1]
    prompts = [row for row in running if row[1] > 1]
    for request_id, missing in decodes + prompts:
        num_tokens = min(missing, budget)
        if 0 < missing <= budget:
            plan[request_id] = num_tokens
            budget -= num_tokens
    return plan
