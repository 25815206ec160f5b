# fault: appends the new tokens to the caller's prompt.
# fails: check_no_cache

# %% nbgrader={"grade_id": "generate_no_cache"}
def generate_no_cache(model, prompt, num_new_tokens):
    """Greedy generation without a cache. prompt: list of S ids -> list of num_new_tokens ids."""
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        logits = model(tokens, 0)
        tokens.append(int(logits.argmax()))
    output = tokens[len(prompt) :]
    prompt += output
    return output
