# fault: equal largest logits share the probability.
# fails: check_greedy

# %% nbgrader={"grade_id": "probabilities"}
def probabilities(logits, temperature):
    """Softmax of logits / temperature over each row, [rows, vocab] float32; temperature 0: all on the largest logit."""
    largest = logits.amax(dim=-1, keepdim=True)
    weights = (logits == largest).float() if temperature == 0 else ((logits - largest) / temperature).exp()
    return weights / weights.sum(dim=-1, keepdim=True)
