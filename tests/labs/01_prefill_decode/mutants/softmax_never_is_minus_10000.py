# fault: -10,000 stands for minus infinity, and is a logit like others where all are as low.
# fails: check_softmax

# %% nbgrader={"grade_id": "probabilities"}
def probabilities(logits, temperature):
    """Softmax of logits / temperature over each row, [rows, vocab] float32; temperature 0: all on the largest logit."""
    if temperature == 0:
        first = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter(1, first, 1.0)
    logits = logits.clamp(min=-1e4)
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    weights = scores.exp()
    return weights / weights.sum(dim=-1, keepdim=True)
