# fault: token 0 ends the text.
# fails: check_no_cache

# %% nbgrader={"grade_id": "generate_no_cache"}
def generate_no_cache(model, prompt, num_new_tokens):
    """Greedy generation without a cache. prompt: list of S ids -> list of num_new_tokens ids."""
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        logits = model(tokens, 0)
        tokens.append(int(logits.argmax()))
        if tokens[-1] == 0:
            break
    return tokens[len(prompt) :]
