# fault: looks for a logit above 0, and takes token 0 if there is none.
# fails: check_no_cache

# %% nbgrader={"grade_id": "generate_no_cache"}
def generate_no_cache(model, prompt, num_new_tokens):
    """Greedy generation without a cache. prompt: list of S ids -> list of num_new_tokens ids."""
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        logits = model(tokens, 0)
        best, largest = 0, 0.0
        for token, logit in enumerate(logits.tolist()):
            if logit > largest:
                best, largest = token, logit
        tokens.append(best)
    return tokens[len(prompt) :]
