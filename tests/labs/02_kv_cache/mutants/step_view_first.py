# fault: takes the view before the append: the new tokens do not see themselves.
# fails: check_step, check_engine

# %% nbgrader={"grade_id": "attention_step"}
def attention_step(cache, attend, q, k, v):
    """Stores k and v in the cache, then attends. q [num_new, num_heads, head_dim] -> like q."""
    past_len = len(cache)
    keys, values = cache.view()
    cache.append(k, v)
    return attend(q, keys, values, past_len)
