# fault: token 0 is padding, and is never chosen.
# fails: check_no_cache

# %% nbgrader={"grade_id": "generate_no_cache"}
def generate_no_cache(model, prompt, num_new_tokens):
    """Greedy generation without a cache. prompt: list of S ids -> list of num_new_tokens ids."""
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        logits = model(tokens, 0)
        tokens.append(int(logits[1:].argmax()) + 1)
    return tokens[len(prompt) :]
