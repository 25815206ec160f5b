# fault: hands over only the newest token, as if the model remembered the others.
# fails: check_no_cache

# %% nbgrader={"grade_id": "generate_no_cache"}
def generate_no_cache(model, prompt, num_new_tokens):
    """Greedy generation that recomputes everything. prompt: list of S ids -> list of num_new_tokens ids."""
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        logits = model(tokens[-1:] if len(tokens) > len(prompt) else tokens, 0)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
