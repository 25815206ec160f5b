# fault: takes every call with more than one token for the first: past_len 0.
# fails: check_step, check_engine

# %% nbgrader={"grade_id": "attention_step"}
def attention_step(cache, attend, q, k, v):
    """Stores k and v in the cache, then attends. q [num_new, num_heads, head_dim] -> like q."""
    past_len = len(cache) if len(q) == 1 else 0
    cache.append(k, v)
    keys, values = cache.view()
    return attend(q, keys, values, past_len)
