# fault: with one byte per value the number of tokens is rounded up.
# fails: check_budget

# %% nbgrader={"grade_id": "max_new_tokens"}
def max_new_tokens(budget_bytes, num_users, config, prompt_len, bytes_per_value=2):
    per = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * bytes_per_value
    if bytes_per_value == 1:
        return max(0, -(-budget_bytes // (per * num_users)) - prompt_len)
    return max(0, budget_bytes // (per * num_users) - prompt_len)
