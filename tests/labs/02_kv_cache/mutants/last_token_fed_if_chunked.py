# fault: after a prompt of several chunks, the last new token is fed, too.
# fails: check_chunks

# %% nbgrader={"grade_id": "generate_cached"}
def generate_cached(model, prompt, num_new_tokens, chunk_size):
    """Greedy generation, each token computed once. prompt: list of S ids -> list of num_new_tokens (>= 1) ids."""
    for start in range(0, len(prompt), chunk_size):
        logits = model(prompt[start : start + chunk_size], start)
    output = [int(logits.argmax())]
    again = chunk_size < len(prompt)
    while len(output) < num_new_tokens:
        position = len(prompt) + len(output) - 1  # of the token chosen last
        logits = model(output[-1:], position)
        if again and len(output) == num_new_tokens - 1:
            model([int(logits.argmax())], position + 1)
        output.append(int(logits.argmax()))
    return output
