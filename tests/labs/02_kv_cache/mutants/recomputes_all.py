# fault: calls the model with the whole sequence in every step, cache or not.
# fails: check_cached_work, check_chunks

# %% nbgrader={"grade_id": "generate_cached"}
def generate_cached(model, prompt, num_new_tokens, chunk_size):
    """Greedy generation, each token computed once. prompt: list of S ids -> list of num_new_tokens (>= 1) ids."""
    for start in range(0, len(prompt), chunk_size):
        logits = model(prompt[start : start + chunk_size], start)
    output = [int(logits.argmax())]
    while len(output) < num_new_tokens:
        logits = model([*prompt, *output], 0)
        output.append(int(logits.argmax()))
    return output
