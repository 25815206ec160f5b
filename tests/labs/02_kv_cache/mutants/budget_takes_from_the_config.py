# fault: takes the number of layers out of the caller's config.
# fails: check_budget

# %% nbgrader={"grade_id": "max_new_tokens"}
def max_new_tokens(budget_bytes, num_users, config, prompt_len, bytes_per_value=2):
    """Tokens each user can generate after a prompt of prompt_len; budget_bytes is shared evenly."""
    values_per_token = 2 * config.pop("num_hidden_layers") * config["num_key_value_heads"] * config["head_dim"]
    context = budget_bytes // (num_users * values_per_token * bytes_per_value)
    return max(0, context - prompt_len)
