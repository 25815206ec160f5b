# fault: returns tensors without axes in place of ints.
# fails: check_no_cache, check_cached_tokens, check_cached_work, check_chunks

# %% nbgrader={"grade_id": "generate_no_cache"}
def generate_no_cache(model, prompt, num_new_tokens):
    """Greedy generation without a cache. prompt: list of S ids -> list of num_new_tokens ids."""
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        logits = model(tokens, 0)
        tokens.append(logits.argmax())
    return tokens[len(prompt) :]


# %% nbgrader={"grade_id": "generate_cached"}
def generate_cached(model, prompt, num_new_tokens, chunk_size):
    """Greedy generation, each token computed once. prompt: list of S ids -> list of num_new_tokens (>= 1) ids."""
    for start in range(0, len(prompt), chunk_size):
        logits = model(prompt[start : start + chunk_size], start)
    output = [logits.argmax()]
    while len(output) < num_new_tokens:
        position = len(prompt) + len(output) - 1  # of the token chosen last
        logits = model(output[-1:], position)
        output.append(logits.argmax())
    return output
