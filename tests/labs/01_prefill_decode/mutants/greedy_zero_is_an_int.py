# fault: a temperature of 0.0 is not taken for 0.
# fails: check_greedy

# %% nbgrader={"grade_id": "probabilities"}
import torch


def probabilities(logits, temperature):
    """Softmax of logits / temperature over each row, [rows, vocab] float32; temperature 0: all on the largest logit."""
    if isinstance(temperature, int) and temperature == 0:
        first = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter(1, first, 1.0)
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    weights = scores.exp()
    return weights / weights.sum(dim=-1, keepdim=True)
