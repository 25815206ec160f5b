# fault: what a prompt gave is kept, also for another model.
# fails: check_no_cache

# %% nbgrader={"grade_id": "generate_no_cache"}
KEPT = {}


def generate_no_cache(model, prompt, num_new_tokens):
    """Greedy generation without a cache. prompt: list of S ids -> list of num_new_tokens ids."""
    if tuple(prompt) in KEPT:
        return KEPT[tuple(prompt)][:num_new_tokens]
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        logits = model(tokens, 0)
        tokens.append(int(logits.argmax()))
    KEPT[tuple(prompt)] = tokens[len(prompt) :]
    return KEPT[tuple(prompt)]
