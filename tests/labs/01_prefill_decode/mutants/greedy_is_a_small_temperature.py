# fault: temperature 0 is taken for a very small one: equal logits share.
# fails: check_greedy

# %% nbgrader={"grade_id": "probabilities"}
def probabilities(logits, temperature):
    """Softmax of logits / temperature over each row, [rows, vocab] float32; temperature 0: all on the largest logit."""
    temperature = max(temperature, 1e-6)
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    weights = scores.exp()
    return weights / weights.sum(dim=-1, keepdim=True)
